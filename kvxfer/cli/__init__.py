# SPDX-License-Identifier: Apache-2.0
"""The ``kvxfer`` command.

    main             entry point; names the extra to install where Typer or Rich is missing
    app              the Typer application: commands, options, exit codes
    failures         how a command ends that cannot do its work
    deployment       --config and --model: vLLM's arguments, and our connectors among them

    demo             the main job on real engines: save in one process, load in another
      demo_model     the model: where it lies, how it is cached, how long prompts may be
      checkpoint     a small Llama with real-sized random weights, made on the spot
      engine_job     what an engine process has to do, and its settings
      engine_client  runs one engine process, passes on its progress, ends it in any case
      engine_process the program of that process: a vLLM engine with kvxfer, one job, then the end
      store_tap      what moved between that engine and its store; damages values for the control
      local_pool     a Mooncake pool of this host, for --store mooncake
      comparison     cold run against warm run: the verdict and the table

    doctor           what makes a deployment useless or fail late; a package of checks
    explain          what a lookup of a prompt would answer now, as a picture
      model_client   asks a process that imports vLLM, and survives it
      model_process  the program of that process: this installation, a model, a prompt
    stats            a table of what an engine or a store counts, live with --watch
      scrape         an engine's metrics page, kvxfer's part of it
    bench            what this machine does, as a table, JSON, a page or a PNG
      bench_cases    each case beside what it has to be compared with
    store_commands   list, size, purge
      store_contents what a store holds, read from its keys
      opened_store   stores as commands open them: nothing is made, resized or leased
      mooncake_pool  a pool without a client, over its master's HTTP port

The command itself imports neither vLLM nor torch. ``engine_process`` and ``model_process`` do, in
processes of their own; they are programs, not modules of the house.
"""

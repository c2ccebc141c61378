# SPDX-License-Identifier: Apache-2.0
"""The ``kvxfer`` command.

    main             entry point; names the extra to install where Typer or Rich is missing
    app              the Typer application: commands, options, exit codes
    demo             the main job on real engines: save in one process, load in another
      checkpoint     a small Llama with real-sized random weights, made on the spot
      engine_job     what an engine process has to do, and its settings
      engine_client  runs one engine process, passes on its progress, ends it in any case
      engine_process the program of that process: a vLLM engine with kvxfer, one job, then the end
      store_tap      what moved between that engine and its store; damages values for the control
      comparison     cold run against warm run: the verdict and the table

The parent process of the demo imports neither vLLM nor torch. ``engine_process`` alone imports
vLLM, as a user's program would; it is a program, not a module of the house.
"""

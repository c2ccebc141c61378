/* SPDX-License-Identifier: Apache-2.0 */
/* The copy loops on several threads at once, for ThreadSanitizer: one source, a target a thread.
 *
 * With SHARED_TARGET all threads write the same target: a race that the sanitizer has to report.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "block_copy.h"
#include "host_copy.h"

enum { NUM_THREADS = 4, NUM_ROUNDS = 6, SOURCE_BYTES = 1 << 20 };

static const size_t FRAGMENT_BYTES[] = {1, 64, 255, 1024, 4096, 16391};

static char *source;
static char *shared_target;

/* Copy the source in fragments at every level; return whether the target is the source then. */
static int copy_all(char *target, size_t fragment_bytes) {
    for (int level = KVX_COPY_PLAIN; level <= kvx_copy_level(); ++level) {
        kvx_copier copier;
        memset(target, 0xA5, SOURCE_BYTES);
        kvx_copier_begin(&copier, level);
        for (size_t at = 0; at < SOURCE_BYTES; at += fragment_bytes)
            kvx_copier_add(&copier, target + at, source + at,
                           kvx_min(fragment_bytes, SOURCE_BYTES - at));
        kvx_copier_end(&copier);
        if (memcmp(target, source, SOURCE_BYTES) != 0) return 0;
    }
    return 1;
}

static void *run(void *unused) {
    size_t num_sizes = sizeof FRAGMENT_BYTES / sizeof *FRAGMENT_BYTES;
    char *target = shared_target ? shared_target : malloc(SOURCE_BYTES);
    int is_right = 1;
    for (int round = 0; round < NUM_ROUNDS; ++round)
        is_right &= copy_all(target, FRAGMENT_BYTES[round % num_sizes]);
    if (!shared_target) free(target);
    return is_right ? unused : (void *)1;
}

int main(void) {
    pthread_t threads[NUM_THREADS];
    int num_wrong = 0;
    source = malloc(SOURCE_BYTES);
    for (size_t at = 0; at < SOURCE_BYTES; ++at) source[at] = (char)(at * 31 >> 3);
#ifdef SHARED_TARGET
    shared_target = malloc(SOURCE_BYTES);
#endif
    for (int idx = 0; idx < NUM_THREADS; ++idx) pthread_create(&threads[idx], NULL, run, NULL);
    for (int idx = 0; idx < NUM_THREADS; ++idx) {
        void *wrong;
        pthread_join(threads[idx], &wrong);
        num_wrong += wrong != NULL;
    }
    printf("%d of %d threads copied wrongly\n", num_wrong, NUM_THREADS);
    return num_wrong != 0;
}

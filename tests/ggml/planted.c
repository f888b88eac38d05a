/* An engine that is not what its version says: the libraries of a real one, behind a library that has
 * something planted. Loads the backend as ggml does.
 *
 *   planted BASE CPU BACKEND
 *
 * BASE is planted_base.c, linked with the engine's own base. */
#define _POSIX_C_SOURCE 199309L

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Holds the allocator's locks whenever the process is forked. */
static void *allocate(void *unused) {
    for (size_t i = 1;; i++) {
        volatile char *memory = malloc(i % 100000);
        if (memory) *memory = 1;
        free((void *)memory);
    }
    return unused;
}

int main(int count, char **words) {
    void *library = NULL;
    for (int i = 1; i < count; i++)
        if (!(library = dlopen(words[i], RTLD_NOW | RTLD_LOCAL))) {
            fprintf(stderr, "%s\n", dlerror());
            return 2;
        }
    void *(*init)(void) = (void *(*)(void))dlsym(library, "ggml_backend_init");
    if (!init) return 3;
    const char *threads = getenv("PLANTED_THREADS");
    for (int i = threads ? atoi(threads) : 0; i > 0; i--) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, allocate, NULL) != 0) return 4;
    }
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    void *registration = init();
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("in %d\n", registration != NULL);
    printf("us %ld\n", (end.tv_sec - start.tv_sec) * 1000000 + (end.tv_nsec - start.tv_nsec) / 1000);
    return 0;
}

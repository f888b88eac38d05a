/* An engine of a version that nobody knows: loads the backend as ggml does, which must refuse. */
#include <dlfcn.h>
#include <stdio.h>

const char *ggml_version(void) { return "0.99.0"; }

int main(int count, char **words) {
    void *library = count == 2 ? dlopen(words[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    void *(*init)(void) = library ? (void *(*)(void))dlsym(library, "ggml_backend_init") : NULL;
    if (!init) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    return init() == NULL ? 0 : 1;
}

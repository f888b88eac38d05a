// A library of kernels (module.cpp), as a program loads it.
#pragma once

#include <dlfcn.h>

#include "device.h"

namespace cases {

class Module {
public:
    explicit Module(const char* path) : library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        if (library_ == nullptr) shim::fail(dlerror());
        symbol("kvfs_module_find", find_);
        symbol("kvfs_module_run", run_);
    }

    // Runs a grid; without blocks it does nothing.
    template <class Arguments>
    void launch(const char* kernel, size_t x, size_t y, uint64_t seed,
                const Arguments& arguments) const {
        size_t bytes = 0;
        const int number = find_(kernel, &bytes);
        if (number < 0 || bytes != sizeof(Arguments)) shim::fail(kernel);
        if (x * y > 0) run_(number, x, y, kvfs::BLOCK_THREADS, seed, &arguments);
    }

    template <class Function>
    void symbol(const char* name, Function*& function) const {
        function = reinterpret_cast<Function*>(dlsym(library_, name));
        if (function == nullptr) shim::fail(name);
    }

private:
    void* library_;
    int (*find_)(const char*, size_t*);
    void (*run_)(int, unsigned, unsigned, unsigned, uint64_t, const void*);
};

}  // namespace cases

# What is done daily; `just --list` shows it. https://just.systems

tools := justfile_directory() / "target/test-tools"
export PATH := tools / "bin:" + env("PATH")
export KVFS_TEST_PYTHON := tools / "python/bin/python"
export KVFS_TEST_LLAMA := tools / "llama.cpp-0.5.0"

# What must hold before a commit: formatting, lints, documents
check:
    cargo fmt --all --check
    cargo clippy --locked --all-targets --workspace -- -D warnings
    RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps
    cargo test --locked --doc
    cargo nextest run --locked --test tidy
    shellcheck mount-scripts/*.sh kernels/*.sh tests/*.sh tests/*/*.sh .ci/run

# Tests that need no mount
unit:
    cargo nextest run --locked --lib --bins --test models --test files_model --test tidy

# Tests of one suite, by the beginning of their names
test suite *names:
    cargo nextest run --locked --test {{suite}} {{names}}

# The same through /dev/fuse instead of rings
device suite *names:
    KVFS_IO_URING=no cargo nextest run --locked --test {{suite}} {{names}}

# libkvfs.so and libkvfs.a
library *arguments:
    mount-scripts/build-c-library.sh {{arguments}}

# The Python package, with the program in it
wheel *arguments:
    mount-scripts/build-wheel.sh {{arguments}}

# Writes include/kvfs.h anew
header:
    KVFS_BLESS=1 cargo test --locked --test c_abi header::is_up_to_date

# Which changes of a file no test notices
mutants file:
    tests/mutants.sh --file {{file}}

# Load, moves and kills for so many seconds
soak seconds="600":
    KVFS_SOAK_SECONDS={{seconds}} cargo nextest run --locked --test soak --no-capture

//! What tests need of the machine; what happens where it is missing is in [`super::skips`].

use std::path::{Path, PathBuf};

/// Whether the machine has something that a test needs. If not, says so, or panics if the
/// environment promises it.
#[track_caller]
pub(crate) fn available(what: &str) -> bool {
    // `loop` can only be named as a raw identifier.
    let what = what.strip_prefix("r#").unwrap_or(what);
    super::skips::is_there(what, missing(what))
}

/// Why something cannot be used.
fn missing(what: &str) -> Option<String> {
    match what {
        "fuse" => {
            let opened = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
            opened.err().map(|error| format!("no /dev/fuse: {error}"))
        }
        "root" => (!nix::unistd::geteuid().is_root()).then(|| "not root".to_owned()),
        "loop" => (!Path::new("/dev/loop-control").exists()).then(|| "no loop devices".to_owned()),
        "io_uring" => {
            let parameter = "/sys/module/fuse/parameters/enable_uring";
            let value = std::fs::read_to_string(parameter).unwrap_or_default();
            if std::env::var("KVFS_IO_URING").is_ok_and(|wanted| wanted == "no") {
                Some("KVFS_IO_URING is no".to_owned())
            } else if value.is_empty() {
                Some(format!("no {parameter} (Linux 6.14 has it)"))
            } else {
                // A mount of root's turns it on.
                let may = value.trim() == "Y" || nix::unistd::geteuid().is_root();
                (!may).then(|| format!("{parameter} is not Y, and root alone may turn it on"))
            }
        }
        "s3" => s3_server().is_none().then(|| {
            "no S3 server: cargo install s3s-fs --version 0.14.1 --features binary --locked, and \
             PATH or KVFS_S3S_FS"
                .to_owned()
        }),
        "xfs" => missing_program("mkfs.xfs").or_else(|| {
            let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
            let is_known = known.lines().any(|line| line.trim() == "xfs");
            (!is_known).then(|| "a kernel without XFS".to_owned())
        }),
        "nfs" => super::nfs::missing(),
        "nfs_server" => super::nfs::missing_server(),
        "nfs_machine" => {
            missing_program("qemu-system-x86_64").or_else(super::ganesha::missing).or_else(|| {
                (!super::ganesha::tools().join("root/boot").is_dir()).then(|| {
                    "no kernel with an NFS client: mount-scripts/fetch-nfs.sh fetches one"
                        .to_owned()
                })
            })
        }
        "llama" => (!llama_directory().join("include/llama.h").is_file())
            .then(|| "no llama.cpp: mount-scripts/fetch-llama.sh fetches it".to_owned()),
        "llama_releases" => llama_releases().is_empty().then(|| {
            "no releases: mount-scripts/fetch-llama.sh --releases fetches them".to_owned()
        }),
        "tmpfs_attributes" => missing_tmpfs_attributes(),
        "rpc" => (!llama_directory().join("rpc/libggml-rpc.so").is_file())
            .then(|| "no RPC backend: mount-scripts/fetch-llama.sh builds it".to_owned()),
        "cgroup" => super::memory_group::MemoryGroup::new(1 << 30).err(),
        "nvrtc" => missing_nvrtc(),
        "descriptors" => missing_descriptors(),
        "overlay" => missing_overlay(),
        "python" => missing_program("python3"),
        "wheel" => {
            let mut python = std::process::Command::new(wheel_python());
            let ran = python.args(["-c", "import kvfs, numpy, pytest"]).current_dir("/").output();
            let there = ran.is_ok_and(|output| output.status.success());
            (!there).then(|| "no wheel is installed: mount-scripts/test.sh does that".to_owned())
        }
        "safetensors" => missing_python_packages("numpy, safetensors, xxhash"),
        "xllamacpp" => missing_python_packages("gguf, numpy, safetensors, xllamacpp"),
        program => missing_program(program),
    }
}

/// The compiler and the assembler of the kernels, where `kernels/build.py` looks for them.
fn missing_nvrtc() -> Option<String> {
    let named = std::env::var_os("KVFS_CUDA_TOOLS").map(PathBuf::from);
    let usual = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/test-tools/cuda");
    let tools = named.unwrap_or_else(usual).join("nvidia");
    let found = ["cuda_nvrtc/lib/libnvrtc.so.12", "cuda_nvcc/bin/ptxas"]
        .iter()
        .all(|file| tools.join(file).is_file());
    (!found).then(|| "no NVRTC and ptxas: kernels/install-tools.sh".to_owned())
}

/// As many descriptors as the tests of many open files take, and some for the rest.
fn missing_descriptors() -> Option<String> {
    use nix::sys::resource::{Resource, getrlimit};
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    (most < 9_000).then(|| format!("a process may have {most} descriptors only"))
}

/// An overlay whose upper directory lies where stores of tests lie.
fn missing_overlay() -> Option<String> {
    let directory = super::mount::scratch_directory();
    let outcome = super::mount::mount_overlay(directory.path());
    let merged = outcome.map(|merged| {
        super::forks::succeed(std::process::Command::new("umount").arg(merged));
    });
    merged.err().map(|reason| format!("no overlay: {reason}"))
}

/// Attributes of users on a tmpfs came with Linux 6.6.
fn missing_tmpfs_attributes() -> Option<String> {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").map_err(|error| error.to_string());
    let set = file.and_then(|file| {
        super::sys::setxattr(file.path(), "user.kvfs", b"1").map_err(|error| error.to_string())
    });
    set.err().map(|error| format!("no attributes on /dev/shm: {error}"))
}

/// The packages that mount-scripts/test.sh installs for `KVFS_TEST_PYTHON`.
fn missing_python_packages(packages: &str) -> Option<String> {
    let program = std::env::var("KVFS_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut python = std::process::Command::new(program);
    let ran = python.args(["-c", &format!("import {packages}")]).output();
    let there = ran.is_ok_and(|output| output.status.success());
    (!there).then(|| format!("no Python with {packages}"))
}

/// The S3 server that tests start: `KVFS_S3S_FS`, or `s3s-fs` on the PATH.
pub(crate) fn s3_server() -> Option<PathBuf> {
    let named = std::env::var_os("KVFS_S3S_FS").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|directory| directory.join("s3s-fs"));
    named.into_iter().chain(found).find(|program| program.is_file())
}

/// The engine that `mount-scripts/fetch-llama.sh` fetches: `KVFS_TEST_LLAMA`, or where that puts it.
pub(crate) fn llama_directory() -> PathBuf {
    let named = std::env::var_os("KVFS_TEST_LLAMA").map(PathBuf::from);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    named.unwrap_or_else(|| root.join("target/test-tools/llama.cpp-0.5.0"))
}

/// The Python that has the wheel: `KVFS_TEST_WHEEL`, or where `mount-scripts/test.sh` installs it.
pub(crate) fn wheel_python() -> PathBuf {
    let named = std::env::var_os("KVFS_TEST_WHEEL").map(PathBuf::from);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    named.unwrap_or_else(|| root.join("target/test-tools/wheel/bin/python"))
}

/// The releases that `mount-scripts/fetch-llama.sh --releases` fetches, from the oldest to the newest.
pub(crate) fn llama_releases() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/test-tools/llama.cpp-releases");
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    found.retain(|path| path.join("include/llama.h").is_file());
    let number = |path: &PathBuf| -> Vec<u32> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.split('.').filter_map(|part| part.parse().ok()).collect()
    };
    found.sort_by_key(number);
    found
}

pub(crate) fn missing_program(name: &str) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|directory| directory.join(name).is_file());
    (!found).then(|| format!("no program {name}"))
}

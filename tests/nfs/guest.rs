//! What a virtual machine boots into: busybox, the modules of an NFS client, kvfs and this very program,
//! with the libraries that they ask for.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::forks::{shell, succeed};
use crate::common::ganesha::tools;

/// Each after those that it needs.
const MODULES: [&str; 19] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "virtio_net",
    "virtio_blk",
    "crc32c-intel",
    "fuse",
    "sunrpc",
    "grace",
    "lockd",
    "netfs",
    "fscache",
    "dns_resolver",
    "nfs",
    "nfsv4",
];
const DIRECTORIES: [&str; 8] = ["bin", "dev", "proc", "sys", "tmp", "modules", "nfs", "disk"];
/// Where the machine's user-mode network has the machine itself, and this one.
const GUEST: &str = "10.0.2.15";
const HOST: &str = "10.0.2.2";

/// What the program in the machine is told.
pub(crate) struct Task<'a> {
    /// Of the NFS server.
    pub(crate) nfs_port: u16,
    /// Of who takes orders for it.
    pub(crate) control_port: u16,
    /// Of this program.
    pub(crate) arguments: &'a str,
    /// What it prints last, before how it ended.
    pub(crate) mark: &'a str,
}

/// The kernel.
pub(crate) fn kernel() -> PathBuf {
    let boot = tools().join("root/boot");
    let mut files = boot.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let is_kernel =
        |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("vmlinuz");
    files.find(is_kernel).expect("a kernel beside the NFS server")
}

/// Makes the archive that the kernel unpacks into memory.
pub(crate) fn initial_files(directory: &Path, task: &Task<'_>) -> PathBuf {
    let tree = directory.join("tree");
    for name in DIRECTORIES {
        std::fs::create_dir_all(tree.join(name)).unwrap();
    }
    let busybox = tools().join("root/bin/busybox");
    std::fs::copy(&busybox, tree.join("bin/busybox")).unwrap();
    for applet in succeed(Command::new(&busybox).arg("--list")).lines() {
        if applet != "busybox" {
            symlink("busybox", tree.join("bin").join(applet)).unwrap();
        }
    }
    let find = format!("find '{}' -name '*.ko'", tools().join("root/lib/modules").display());
    let found = shell(directory, &find);
    for (number, module) in MODULES.iter().enumerate() {
        let file = format!("/{module}.ko");
        let source = found.lines().find(|path| path.ends_with(&file));
        let source = source.unwrap_or_else(|| panic!("the kernel has no module {module}"));
        std::fs::copy(source, tree.join(format!("modules/{:02}-{module}", number + 10))).unwrap();
    }
    let own = std::env::current_exe().unwrap();
    for program in [own.as_path(), Path::new(env!("CARGO_BIN_EXE_kvfs"))] {
        let inside = below(&tree, program);
        succeed(Command::new("strip").arg("-o").arg(&inside).arg(program));
        for library in libraries(program) {
            std::fs::copy(&library, below(&tree, &library)).unwrap();
        }
    }
    let init = tree.join("init");
    std::fs::write(&init, script(&own, task)).unwrap();
    std::fs::set_permissions(&init, PermissionsExt::from_mode(0o755)).unwrap();
    shell(&tree, &format!("find . | '{}' cpio -o -H newc >../initial", busybox.display()));
    directory.join("initial")
}

/// Where a file of this machine is in the other, its directory made.
fn below(tree: &Path, path: &Path) -> PathBuf {
    let inside = tree.join(path.strip_prefix("/").unwrap());
    std::fs::create_dir_all(inside.parent().unwrap()).unwrap();
    inside
}

/// The files that the dynamic linker loads for a program, itself included.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let listed = succeed(Command::new("ldd").arg(program));
    let words = listed.split_whitespace().filter(|word| word.starts_with('/'));
    words.map(PathBuf::from).collect()
}

/// The first program of the machine: mounts everything, runs this one, and turns it off.
fn script(program: &Path, task: &Task<'_>) -> String {
    let Task { nfs_port, control_port, arguments, mark } = task;
    let settings: String = ["KVFS_NFS_OUTAGES", "KVFS_SEED", "RUST_LOG"]
        .iter()
        .filter_map(|name| Some(format!("export {name}='{}'\n", std::env::var(name).ok()?)))
        .collect();
    format!(
        "#!/bin/sh\n\
         export PATH=/bin RUST_BACKTRACE=1 KVFS_TEST_DIR=/disk KVFS_REQUIRE=fuse,nfs_server\n\
         export KVFS_TEST_NFS=/nfs KVFS_TEST_NFS_CONTROL={HOST}:{control_port}\n\
         {settings}\
         mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys\n\
         for module in /modules/*; do insmod $module; done\n\
         ip link set lo up; ip link set eth0 up; ip addr add {GUEST}/24 dev eth0\n\
         mount -t ext4 /dev/vda /disk\n\
         mount -i -t nfs4 -o vers=4.1,addr={HOST},clientaddr={GUEST},port={nfs_port} {HOST}:/kv /nfs\n\
         '{}' {arguments}\n\
         echo \"{mark} $?\"\n\
         poweroff -f\n",
        program.display()
    )
}

//! `mount-scripts/package.sh`: what is in the package, that it goes into a system that has what it needs and into no
//! other, works there, and leaves nothing when it is removed.

#![expect(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "common/skips.rs"]
mod skips;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What has to be there: packages, by the names that Debian gives them, with a version.
const INSTALLED: [(&str, &str); 3] =
    [("fuse3", "3.14.0"), ("libgcc-s1", "12.2.0"), ("libc6", "99")];

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("mount-scripts").join(name)
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn there(program: &str, version: &str) -> bool {
    let ran = Command::new(program).arg(version).output();
    ran.is_ok_and(|ran| ran.status.success())
}

/// Whether packages can be built and installed here.
fn is_possible() -> bool {
    let missing =
        ["dpkg-deb", "dpkg", "objcopy", "cc"].into_iter().find(|it| !there(it, "--version"));
    let missing = missing.map(|program| format!("{program} is missing"));
    let is_root = nix::unistd::geteuid().is_root();
    skips::is_there("dpkg", missing)
        && skips::is_there("root", (!is_root).then(|| "only root installs packages".to_owned()))
}

/// This build's program without what a debugger needs, and a library of that name.
fn build(directory: &Path) {
    fs::create_dir(directory).unwrap();
    let program = directory.join("kvfs");
    succeed(Command::new("strip").arg("-o").arg(&program).arg(env!("CARGO_BIN_EXE_kvfs")));
    let source = directory.join("kvfs.c");
    fs::write(&source, "int kvfs_abi_version(void) { return 1; }\n").unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wl,-soname,libkvfs.so", "-o"]);
    succeed(compiler.arg(directory.join("libkvfs.so")).arg(source));
}

/// Runs the script on what was built.
fn package(built: &Path, to: &Path) -> Output {
    let mut command = Command::new(script("package.sh"));
    command.arg(to).env("BINARY", built.join("kvfs")).env_remove("LIBRARY");
    command.env("SOURCE_DATE_EPOCH", "1700000000").output().unwrap()
}

fn the_package(directory: &Path) -> PathBuf {
    let entries = directory.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let mut packages = entries.filter(|path| path.extension().is_some_and(|it| it == "deb"));
    packages.next().unwrap()
}

/// A system with nothing in it but what dpkg knows.
struct System(PathBuf);

impl System {
    fn new(root: PathBuf, has: &[(&str, &str)]) -> System {
        for directory in ["info", "updates", "triggers", "parts"] {
            fs::create_dir_all(root.join("var/lib/dpkg").join(directory)).unwrap();
        }
        let entries = has.iter().map(|(name, version)| {
            format!(
                "Package: {name}\nStatus: install ok installed\nArchitecture: {}\nVersion: {version}\n\
                 Maintainer: nobody\nDescription: there\n\n",
                succeed(Command::new("dpkg").arg("--print-architecture")).trim()
            )
        });
        fs::write(root.join("var/lib/dpkg/status"), entries.collect::<String>()).unwrap();
        System(root)
    }

    fn dpkg(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("dpkg");
        command.arg("--log=/dev/null").arg(format!("--root={}", self.0.display()));
        command.args(arguments).env("LC_ALL", "C").output().unwrap()
    }

    /// Everything but what dpkg itself writes, directories too.
    fn content(&self) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        let mut left = vec![self.0.clone()];
        while let Some(directory) = left.pop() {
            for entry in directory.read_dir().unwrap().map(Result::unwrap) {
                let path = entry.path();
                let inside = path.strip_prefix(&self.0).unwrap().to_owned();
                if inside.starts_with("var") {
                    continue;
                }
                if entry.file_type().unwrap().is_dir() {
                    left.push(path);
                }
                found.insert(inside);
            }
        }
        found
    }
}

#[test]
fn a_package_is_installed_works_and_goes_again() {
    if !is_possible() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let built = place.path().join("built");
    build(&built);
    let to = place.path().join("packages");
    let made = package(&built, &to);
    assert!(made.status.success(), "{made:?}");
    let file = the_package(&to);
    let name = file.to_str().unwrap();
    assert!(name.contains(concat!("kvfs_", env!("CARGO_PKG_VERSION"), "_")), "{name}");
    let control = succeed(Command::new("dpkg-deb").args(["-f", name]));
    assert!(control.contains("\nDepends: fuse3, libgcc-s1, libc6 (>= 2."), "{control}");
    check_lint(name);

    let bare = System::new(place.path().join("bare"), &INSTALLED[1..]);
    let refused = bare.dpkg(&["-i", name]);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && why.contains("kvfs depends on fuse3"), "{why}");

    let system = System::new(place.path().join("system"), &INSTALLED);
    let installed = system.dpkg(&["-i", name]);
    assert!(installed.status.success(), "{installed:?}");
    check_content(&system);
    check_use(&system);
    check_mount(&system, place.path());
    let verified = system.dpkg(&["--verify", "kvfs"]);
    assert!(verified.status.success() && verified.stdout.is_empty(), "{verified:?}");
    let removed = system.dpkg(&["--purge", "kvfs"]);
    assert!(removed.status.success(), "{removed:?}");
    assert_eq!(system.content(), BTreeSet::new());
}

fn check_content(system: &System) {
    let content = system.content();
    for expected in [
        "usr/bin/kvfs",
        "usr/sbin/mount.kvfs",
        "usr/sbin/umount.fuse.kvfs",
        "usr/include/kvfs.h",
        "usr/lib/modprobe.d/kvfs.conf",
        "usr/lib/systemd/system/kvfs@.service",
        "usr/lib/systemd/system/kvfs-slots@.service",
        "usr/share/man/man1/kvfs.1.gz",
        "usr/share/man/man1/kvfs-mount.1.gz",
        "usr/share/bash-completion/completions/kvfs",
        "usr/share/zsh/site-functions/_kvfs",
        "usr/share/fish/vendor_completions.d/kvfs.fish",
        "usr/share/kvfs/dashboards/kvfs.json",
        "usr/share/kvfs/dashboards/alerts.yml",
        "usr/share/doc/kvfs/copyright",
        "usr/share/doc/kvfs/changelog.gz",
        "usr/share/doc/kvfs/CHANGELOG.md.gz",
    ] {
        assert!(content.contains(Path::new(expected)), "{expected} of {content:#?}");
    }
    let other = ["usr/local", "etc", "usr/share/man/man1/kvfs-probe.1.gz"];
    assert!(!other.iter().any(|path| content.contains(Path::new(path))), "{content:#?}");
    let read = |path: &str| fs::read_to_string(system.0.join(path)).unwrap();
    for (unit, command) in [("kvfs@", "mount"), ("kvfs-slots@", "slots watch")] {
        let unit = read(&format!("usr/lib/systemd/system/{unit}.service"));
        let starts = format!("ExecStart=/usr/bin/kvfs {command}");
        assert!(unit.contains(&starts) && !unit.contains("/usr/local"), "{unit}");
    }
    let copyright = read("usr/share/doc/kvfs/copyright");
    for expected in ["Permission is hereby granted", "Apache-2.0", "\nredb v"] {
        assert!(copyright.contains(expected), "{expected:?} of {copyright}");
    }
}

fn check_use(system: &System) {
    let at = |path: &str| system.0.join(path);
    let said = succeed(Command::new(at("usr/bin/kvfs")).arg("version"));
    assert_eq!(said, concat!("kvfs ", env!("CARGO_PKG_VERSION"), "\n"));
    let page = at("usr/share/man/man1/kvfs-umount.1.gz");
    let page = succeed(Command::new("gzip").arg("-dc").arg(page));
    assert!(page.contains("\\-\\-lazy"), "{page}");

    let mut libraries = fs::read_dir(at("usr/lib")).unwrap().map(|entry| entry.unwrap().path());
    let library = libraries.find(|path| path.join("libkvfs.so").exists()).unwrap();
    let described = fs::read_to_string(library.join("pkgconfig/kvfs.pc")).unwrap();
    assert!(described.contains(concat!("\nVersion: ", env!("CARGO_PKG_VERSION"), "\n")));
    if !there("pkg-config", "--version") {
        eprintln!("pkg-config is missing: nobody has read {described}");
        return;
    }
    let mut asked = Command::new("pkg-config");
    asked
        .env("PKG_CONFIG_SYSROOT_DIR", &system.0)
        .env("PKG_CONFIG_LIBDIR", library.join("pkgconfig"));
    asked.env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1").env("PKG_CONFIG_ALLOW_SYSTEM_CFLAGS", "1");
    let flags = succeed(asked.args(["--cflags", "--libs", "kvfs"]));
    // A program that is built with what it says has header and library.
    let source = at("user.c");
    fs::write(&source, "#include <kvfs.h>\nint main(void) { return kvfs_abi_version() == 0; }\n")
        .unwrap();
    let program = at("user");
    let mut compiler = Command::new("cc");
    compiler.arg(&source).arg("-o").arg(&program).args(flags.split_whitespace());
    succeed(&mut compiler);
    succeed(Command::new(&program).env("LD_LIBRARY_PATH", &library));
    fs::remove_file(source).unwrap();
    fs::remove_file(program).unwrap();
}

/// Lays the package over this system in a mount namespace of its own, as if it were installed here, and uses a store there by
/// the system's mount(8) and by its own command; `$0` is the root with the package, `$1` an empty directory.
const USE: &str = r#"
mkdir "$1/package" "$1/root"
mount -t tmpfs none "$1/package"
cp -a "$0/." "$1/package"
mount -t overlay -o "lowerdir=$1/package:/" none "$1/root"
mount --rbind /dev "$1/root/dev"
mount -t proc none "$1/root/proc"
mount -t tmpfs none "$1/root/mnt"
exec chroot "$1/root" /bin/sh -eu <<'WITHIN'
test "$(readlink -f /sbin/mount.kvfs)" = /usr/bin/kvfs
export KVFS_LOG_FILE=/mnt/log
mkdir /mnt/store /mnt/kv
mount -t kvfs /mnt/store /mnt/kv
echo content >/mnt/kv/files/note
umount /mnt/kv
/usr/bin/kvfs mount /mnt/store /mnt/kv
cat /mnt/kv/files/note
grep '^version: ' /mnt/kv/.kvfs/status
test "$(readlink "/proc/$(sed -n 's/^pid: //p' /mnt/kv/.kvfs/status)/exe")" = /usr/bin/kvfs
/usr/bin/kvfs umount /mnt/kv
/usr/bin/kvfs fsck /mnt/store
WITHIN
"#;

fn check_mount(system: &System, place: &Path) {
    let opened = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let missing = opened.err().map(|error| format!("/dev/fuse: {error}"));
    let can_unshare = Command::new("unshare").args(["-m", "true"]).status();
    let can_unshare = can_unshare.is_ok_and(|status| status.success());
    let unshares = (!can_unshare).then(|| "unshare -m fails".to_owned());
    if !skips::is_there("fuse", missing) || !skips::is_there("unshare", unshares) {
        return;
    }
    let lay =
        "mount -t tmpfs none /mnt; mkdir /mnt/a; mount -t overlay -o lowerdir=/mnt/a:/ none /tmp";
    let laid = Command::new("unshare").args(["-m", "sh", "-ec", lay]).status();
    let laid = laid.is_ok_and(|status| status.success());
    if !skips::is_there(
        "overlay",
        (!laid).then(|| "nothing can be laid over this system".to_owned()),
    ) {
        return;
    }
    let within = place.join("use");
    fs::create_dir(&within).unwrap();
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", "private", "sh", "-euc", USE]).arg(&system.0).arg(&within);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KVFS_") {
            command.env_remove(name);
        }
    }
    let told = succeed(&mut command);
    let version = concat!("version: ", env!("CARGO_PKG_VERSION"), "\n");
    assert!(told.starts_with("content\n") && told.contains(version), "{told}");
}

/// Where it is installed; what it says of a package that no distribution has made is not all for us.
fn check_lint(package: &str) {
    if !there("lintian", "--version") {
        eprintln!("lintian is missing: the package was not looked at by it");
        return;
    }
    let found = Command::new("lintian").args(["--fail-on", "error", package]).output().unwrap();
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stdout));
}

/// As little of a program as install.sh asks for: a package of it is built in no time.
const STAND_IN: &str = r#"
#include <stdio.h>
#include <string.h>
int main(int count, char **arguments) {
    if (count < 2) return 2;
    if (strcmp(arguments[1], "man") != 0) return puts("kvfs VERSION") < 0;
    char page[4096];
    snprintf(page, sizeof page, "%s/kvfs.1", arguments[2]);
    FILE *file = fopen(page, "w");
    return file == NULL || fputs("kvfs", file) < 0 || fclose(file) != 0;
}
"#;

#[test]
fn the_same_program_gives_the_same_package() {
    if !is_possible() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let source = place.path().join("kvfs.c");
    fs::write(&source, STAND_IN.replace("VERSION", env!("CARGO_PKG_VERSION"))).unwrap();
    succeed(Command::new("cc").arg("-g").arg("-o").arg(place.path().join("kvfs")).arg(source));
    let packages = ["one", "two"].map(|name| {
        let to = place.path().join(name);
        let made = package(place.path(), &to);
        assert!(made.status.success(), "{made:?}");
        let told = String::from_utf8(made.stdout).unwrap();
        assert!(told.starts_with("kvfs: ") && to.join("kvfs.debug").exists(), "{told}");
        // A second that passes must not be seen.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        fs::read(the_package(&to)).unwrap()
    });
    assert!(packages[0] == packages[1], "they differ");
}

#[test]
fn what_cannot_be_packaged_is_one_line() {
    if !is_possible() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let to = place.path().join("packages");
    let refused = package(place.path(), &to);
    let line = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && line.contains("kvfs is no program"), "{line}");
    // That of another version is not called this one.
    let other = place.path().join("kvfs");
    fs::write(&other, "#!/bin/sh\necho kvfs 0.0.7\n").unwrap();
    succeed(Command::new("chmod").arg("+x").arg(&other));
    let refused = package(place.path(), &to);
    let line = String::from_utf8(refused.stderr).unwrap();
    assert!(line.contains("is kvfs 0.0.7, and the sources are"), "{line}");
    assert_eq!(line.lines().count(), 1, "{line}");
    assert_eq!(to.read_dir().unwrap().count(), 0);
    let usage = Command::new(script("package.sh")).arg("--fast").output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
}

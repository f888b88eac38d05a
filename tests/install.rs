//! `mount-scripts/install.sh` into a directory: what it puts there works, and goes again.

#![expect(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A root to install below, and a build directory with this build's program.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        let built = directory.path().join("target/release");
        std::fs::create_dir_all(&built).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kvfs"), built.join("kvfs")).unwrap();
        std::fs::write(built.join("libkvfs.so"), "a library").unwrap();
        Place(directory)
    }

    fn root(&self) -> PathBuf {
        self.0.path().join("root")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("mount-scripts/install.sh");
        let mut command = Command::new(script);
        command.args(arguments).env("DESTDIR", self.root());
        command.env("CARGO_TARGET_DIR", self.0.path().join("target")).output().unwrap()
    }

    /// Everything but directories, by path below the root.
    fn installed(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut left = vec![self.root()];
        while let Some(directory) = left.pop() {
            for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
                if entry.file_type().unwrap().is_dir() {
                    left.push(entry.path());
                } else {
                    let path = entry.path();
                    found.push(path.strip_prefix(self.root()).unwrap().display().to_string());
                }
            }
        }
        found.sort();
        found
    }
}

fn succeed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn what_is_installed_works_and_goes_again() {
    let place = Place::new();
    std::fs::create_dir(place.root()).unwrap();
    succeed(&place.run(&[]));
    let installed = place.installed();
    for expected in [
        "usr/local/bin/kvfs",
        "sbin/mount.kvfs",
        "sbin/umount.fuse.kvfs",
        "etc/modprobe.d/kvfs.conf",
        "usr/local/share/man/man1/kvfs.1",
        "usr/local/share/man/man1/kvfs-mount.1",
        "usr/local/share/man/man1/kvfs-remote-ls.1",
        "usr/local/share/bash-completion/completions/kvfs",
        "usr/local/share/zsh/site-functions/_kvfs",
        "usr/local/share/fish/vendor_completions.d/kvfs.fish",
        "usr/local/share/man/man1/kvfs-slots-watch.1",
        "usr/local/lib/systemd/system/kvfs@.service",
        "usr/local/lib/systemd/system/kvfs-slots@.service",
        "usr/local/share/kvfs/dashboards/kvfs.json",
        "usr/local/include/kvfs.h",
        "usr/local/lib/libkvfs.so",
        "usr/local/lib/pkgconfig/kvfs.pc",
    ] {
        assert!(installed.iter().any(|path| path == expected), "{expected} of {installed:#?}");
    }
    // What other commands ask is none for people.
    assert!(!installed.iter().any(|path| path.contains("kvfs-probe")), "{installed:#?}");
    let program = place.root().join("usr/local/bin/kvfs");
    assert!(succeed(&Command::new(program).arg("version").output().unwrap()).starts_with("kvfs "));
    let page = place.root().join("usr/local/share/man/man1/kvfs-umount.1");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("unmount") && page.contains("\\-\\-lazy"), "{page}");

    succeed(&place.run(&["--uninstall"]));
    assert_eq!(place.installed(), Vec::<String>::new());
}

#[test]
fn without_a_library_nothing_speaks_of_one() {
    let place = Place::new();
    std::fs::create_dir(place.root()).unwrap();
    std::fs::remove_file(place.0.path().join("target/release/libkvfs.so")).unwrap();
    let told = succeed(&place.run(&[]));
    assert!(told.contains("without libkvfs.so: mount-scripts/build-c-library.sh"), "{told}");
    let of_library = |path: &String| path.contains("/include/") || path.contains("pkgconfig");
    assert!(!place.installed().iter().any(of_library));
}

/// Bash itself completes with what was installed.
#[test]
fn bash_completes_commands_and_their_arguments() {
    let place = Place::new();
    std::fs::create_dir(place.root()).unwrap();
    succeed(&place.run(&[]));
    let script = place.root().join("usr/local/share/bash-completion/completions/kvfs");
    let complete = |words: &str, word: &str| {
        let ask = format!(
            "source {}; COMP_WORDS=({words} {word}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _kvfs kvfs {word} ''; echo ${{COMPREPLY[@]}}",
            script.display()
        );
        succeed(&Command::new("bash").args(["-c", &ask]).output().unwrap()).trim().to_owned()
    };
    assert_eq!(complete("kvfs", "um"), "umount");
    assert_eq!(complete("kvfs umount", "--la"), "--lazy");
}

#[test]
fn somebody_elses_helper_stays() {
    let place = Place::new();
    let helper = place.root().join("sbin/mount.kvfs");
    std::fs::create_dir_all(helper.parent().unwrap()).unwrap();
    std::fs::write(&helper, "another's").unwrap();
    let output = place.run(&[]);
    assert!(!output.status.success());
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("belongs to something else"), "{told}");
    assert_eq!(place.installed(), ["sbin/mount.kvfs"]);
}

//! What the system does with the program: mount(8) by a line of fstab and umount(8), systemd with its units, and an engine
//! of containers with `Containerfile`.

#![expect(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "common/skips.rs"]
mod skips;

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn said(output: &Output) -> String {
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    text.concat()
}

fn can_mount() -> bool {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let missing = opened.err().map(|error| format!("/dev/fuse: {error}"));
    skips::is_there("fuse", missing)
}

/// Mount namespaces are for root.
fn can_unshare() -> bool {
    let made = Command::new("unshare").args(["-m", "true"]).output();
    let is_made = made.is_ok_and(|made| made.status.success());
    skips::is_there("unshare", (!is_made).then(|| "unshare -m fails".to_owned()))
}

/// Puts the helpers beside those of the system, in a mount namespace of its own, and mounts by a line of a private fstab
/// twice; `$0` is the program, `$1` a directory.
const BY_FSTAB: &str = r#"
helpers=$(readlink -f /sbin)
mkdir "$1/system" "$1/helpers" "$1/mnt"
mount --bind "$helpers" "$1/system"
for program in "$1"/system/*; do ln -s "$program" "$1/helpers/${program##*/}"; done
ln -sf "$0" "$1/helpers/mount.kvfs"
ln -sf "$0" "$1/helpers/umount.fuse.kvfs"
mount --bind "$1/helpers" "$helpers"
echo "$1/store $1/mnt kvfs rw,noexec,nofail,_netdev,x-systemd.automount,commit_interval=7,log_level=info\134054kvfs=debug 0 0" >"$1/fstab"
is_mounted() { grep -q " $1/mnt .* - fuse.kvfs " /proc/self/mountinfo; }
mount --fstab "$1/fstab" "$1/mnt"
is_mounted "$1"
grep " $1/mnt " /proc/self/mountinfo | grep -q noexec
"$0" config show "$1/mnt" | grep commit_interval
echo content >"$1/mnt/files/note"
umount "$1/mnt"
if is_mounted "$1"; then exit 9; fi
# By the store as well, and all of it at once.
mount --fstab "$1/fstab" "$1/store"
cat "$1/mnt/files/note"
umount "$1/mnt"
mount --fstab "$1/fstab" --all
is_mounted "$1"
umount "$1/mnt"
if is_mounted "$1"; then exit 10; fi
echo done
"#;

#[test]
fn a_line_of_fstab_mounts_and_umount_ends_it() {
    if !can_mount() || !can_unshare() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().canonicalize().unwrap();
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", "private", "bash", "-euc", BY_FSTAB]);
    command.arg(env!("CARGO_BIN_EXE_kvfs")).arg(&place);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KVFS_") {
            command.env_remove(name);
        }
    }
    // The log, if nothing names it.
    command.env("KVFS_LOG_FILE", place.join("log"));
    let output = command.output().unwrap();
    let text = said(&output);
    let log = std::fs::read_to_string(place.join("log")).unwrap_or_default();
    assert!(output.status.success(), "{text}\n{log}");
    assert!(text.contains("content\ndone\n"), "{text}");
    let setting = text.lines().find(|line| line.contains("commit_interval")).unwrap();
    assert!(setting.contains('7'), "the line has it: {setting}");
}

/// The units with the path of this build's program, for systemd looks whether it is there.
fn units(to: &Path) -> Vec<PathBuf> {
    let units = ["kvfs@", "kvfs-slots@"].map(|name| {
        let unit = root().join("mount-scripts").join(format!("{name}.service"));
        let text = std::fs::read_to_string(unit).unwrap();
        assert!(text.contains("/usr/local/bin/kvfs "), "{text}");
        let path = to.join(format!("{name}one.service"));
        let text = text.replace("/usr/local/bin/kvfs", env!("CARGO_BIN_EXE_kvfs"));
        std::fs::write(&path, text).unwrap();
        path
    });
    units.to_vec()
}

#[test]
fn systemd_finds_nothing_wrong_with_the_units() {
    let ran = Command::new("systemd-analyze").arg("--version").output();
    let is_there = ran.is_ok_and(|ran| ran.status.success());
    let missing = (!is_there).then(|| "it is not installed".to_owned());
    if !skips::is_there("systemd-analyze", missing) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let verify = |units: &[PathBuf]| {
        let mut command = Command::new("systemd-analyze");
        command.args(["verify", "--man=no", "--recursive-errors=no"]).args(units);
        command.output().unwrap()
    };
    let units = units(directory.path());
    let found = verify(&units);
    assert!(found.status.success() && said(&found).is_empty(), "{}", said(&found));
    // A word that systemd does not know is found.
    let text = std::fs::read_to_string(&units[0]).unwrap();
    std::fs::write(&units[0], text.replace("KillMode=", "KilMode=")).unwrap();
    assert!(said(&verify(&units)).contains("KilMode"), "{}", said(&verify(&units)));
}

/// The words of an instruction that is a list in brackets.
fn listed(instructions: &[String], name: &str) -> Vec<String> {
    let line = instructions.iter().find_map(|line| line.strip_prefix(name)).unwrap();
    serde_json::from_str(line.trim()).unwrap()
}

/// No engine of containers is called: what it would run is looked at, and that can be run here is.
#[test]
fn what_the_containerfile_names_is_there() {
    let text = std::fs::read_to_string(root().join("Containerfile")).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n");
    let instructions: Vec<String> =
        lines.replace("\\\n", " ").lines().map(|line| line.trim().to_owned()).collect();
    let runs: Vec<&str> =
        instructions.iter().filter_map(|line| line.strip_prefix("RUN ")).collect();
    assert_eq!(runs.len(), 3, "{runs:?}");
    for run in &runs {
        let checked = Command::new("sh").args(["-n", "-c", run]).output().unwrap();
        assert!(checked.status.success(), "{run}: {}", said(&checked));
    }
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let version = manifest.lines().find_map(|line| line.strip_prefix("rust-version = "));
    let rust =
        format!("FROM docker.io/library/rust:{}-bookworm", version.unwrap().trim_matches('"'));
    assert!(instructions.iter().any(|line| line.starts_with(&rust)), "{rust}: {instructions:?}");

    // The script that makes the package, where the second stage looks for it.
    let script =
        runs.iter().find_map(|run| run.split(' ').find(|word| word.contains("package.sh")));
    assert!(root().join(script.unwrap()).is_file());
    assert!(runs[1].ends_with("package.sh /packages"), "{}", runs[1]);
    assert!(instructions.contains(&"COPY --from=build /packages/kvfs_*.deb /tmp/".to_owned()));
    assert!(runs[2].contains("/tmp/kvfs_*.deb"), "{}", runs[2]);
    let package = std::fs::read_to_string(root().join("mount-scripts/package.sh")).unwrap();
    assert!(package.contains("kvfs_"), "the name of a package");

    // The package has the program there (`tests/package.rs`), and takes these words.
    let entry = listed(&instructions, "ENTRYPOINT ");
    assert_eq!(entry, ["/usr/bin/kvfs"]);
    for words in [listed(&instructions, "CMD "), vec!["demo".to_owned(), "--help".to_owned()]] {
        let output = Command::new(env!("CARGO_BIN_EXE_kvfs")).args(&words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        assert!(said(&output).contains("Usage: kvfs"), "{}", said(&output));
    }
    assert!(text.contains("kvfs demo\n"), "what its first lines tell to run");
}

//! Commands on sequences in a plain directory: what others lock, put or leave there, and what is told.

#![expect(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvfs::page::{Dtype, Manifest, ManifestFields};

mod common;

/// Another user.
const USER: u32 = 65534;

/// Two models of one cache, each with a sequence `x` of some rows.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        let manifest = Manifest::new(ManifestFields::new("toy", Dtype::F16, 1, 2, 16)).unwrap();
        for model in ["his", "private"] {
            let sequence = place.path(model).join("sequences/x");
            fs::create_dir_all(sequence.join("000")).unwrap();
            fs::write(place.path(model).join("manifest.json"), manifest.to_json()).unwrap();
            let rows = usize::try_from(100 * manifest.geometry().row_bytes()).unwrap();
            fs::write(sequence.join("000/0000000.tail"), vec![0; rows]).unwrap();
            fs::write(sequence.join("tokens"), [0; 100 * 4]).unwrap();
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn fifo(&self, name: &str) {
        nix::unistd::mkfifo(&self.path(name), nix::sys::stat::Mode::S_IRWXU).unwrap();
    }

    fn start<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.current_dir(self.0.path()).args(arguments).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Runs to its end, which nobody else brings about.
    fn run<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Output {
        let mut child = self.start(arguments);
        let end = Instant::now() + Duration::from_secs(60);
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > end {
                child.kill().unwrap();
            }
            sleep(Duration::from_millis(5));
        }
        child.wait_with_output().unwrap()
    }

    /// Gives model `his` to another user.
    fn give_away(&self) {
        fs::set_permissions(self.0.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut found = vec![self.path("his")];
        while let Some(path) = found.pop() {
            chown(&path, Some(USER), Some(USER)).unwrap();
            if path.is_dir() {
                found.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            }
        }
    }

    /// What a command of the other user says on standard error, if it fails.
    fn run_as_user(&self, line: &str) -> Result<(), String> {
        let script = format!("{} {line}", env!("CARGO_BIN_EXE_kvfs"));
        let output =
            common::forks::output(&mut common::forks::shell_as(self.0.path(), USER, &script));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(()) } else { Err(said) }
    }

    /// Expects a refusal that says so.
    fn refuses(&self, line: &str, expected: &str) {
        let output = self.run(line.split(' '));
        let said = String::from_utf8_lossy(&output.stderr);
        // That they differ is what the other code of `diff` says.
        let exit = if line.starts_with("diff ") { 2 } else { 1 };
        assert_eq!(output.status.code(), Some(exit), "{line}: {said}");
        let last = said.lines().last().unwrap_or_default();
        assert!(last.starts_with("kvfs: ") && last.contains(expected), "{line}: {said}");
    }
}

#[test]
fn links_below_a_model_are_refused() {
    let place = Place::new();
    let layer = place.path("his/sequences/x/000");
    fs::remove_dir_all(&layer).unwrap();
    symlink("../../../private/sequences/x/000", &layer).unwrap();
    symlink("../../private/sequences/x", place.path("his/sequences/link")).unwrap();
    symlink("his", place.path("way")).unwrap();
    fs::create_dir(place.path("linked")).unwrap();
    fs::copy(place.path("his/manifest.json"), place.path("linked/manifest.json")).unwrap();
    symlink("../private/sequences", place.path("linked/sequences")).unwrap();
    for line in ["seq save private x saved", "export private/sequences/x slot"] {
        let made = place.run(line.split(' '));
        assert!(made.status.success(), "{line}: {}", String::from_utf8_lossy(&made.stderr));
    }
    for line in [
        "seq show his x",
        "seq rm his x 0..3",
        "seq rm way x ..",
        "seq cp his x y",
        "seq shift his x 0..3 full",
        "seq clear his x --yes",
        "seq save his x out",
        "seq load his link saved",
        "import slot his/sequences/link",
        "seq add his link 0..3 7",
        "import slot linked/sequences/y",
        "seq cp linked x y",
        "export his/sequences/x out",
    ] {
        place.refuses(line, ": is a symbolic link: ");
        assert!(!place.path("out").exists(), "{line}");
    }
    let left = |name: &str| place.path("private/sequences/x").join(name).symlink_metadata();
    assert_eq!(left("000/0000000.tail").unwrap().len(), 100 * 2 * 2 * 2 * 16);
    assert!(left("positions.json").is_err());
    assert!(!place.path("his/sequences/y").exists());
    assert!(!place.path("private/sequences/y").exists());
}

#[test]
fn pipes_are_not_waited_for() {
    let place = Place::new();
    place.fifo("his/sequences/x/positions.json");
    place.fifo("pipe");
    for line in [
        "seq show his x",
        "seq cp his x y",
        "seq save his x out",
        "export his/sequences/x out",
        "diff his/sequences/x private/sequences/x",
        "bench trace pipe",
    ] {
        place.refuses(line, "is no regular file");
    }
    place.refuses("inspect pipe", "pipe: is neither a regular file nor a directory");
}

#[test]
fn whoever_waits_for_a_lock_is_told() {
    let place = Place::new();
    let told = |line: &str, locked: &Path| {
        let lock = File::open(locked).unwrap();
        lock.lock().unwrap();
        let child = place.start(line.split(' '));
        sleep(Duration::from_millis(2500));
        drop(lock);
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{line}: {said}");
        said
    };
    let told_of = |path: &str| format!("kvfs: waiting for whoever has locked {path}\n");
    let said = told("seq cp his x y", &place.path("his/sequences"));
    assert_eq!(said, told_of("his/sequences"));
    let model = place.0.path().canonicalize().unwrap();
    let said = told("model bump his r2 --yes", &model);
    assert_eq!(said, told_of(&model.display().to_string()));
    let undisturbed = place.run("seq cp private x y".split(' '));
    assert_eq!(String::from_utf8_lossy(&undisturbed.stderr), "");
}

#[test]
fn what_is_told_names_what_is_to_blame() {
    let place = Place::new();
    place.fifo("pipe");
    fs::write(place.path("there"), b"").unwrap();
    let remedy = " is there: remove it, or name another file";
    place.refuses("seq save his x pipe", &format!("pipe{remedy}"));
    place.refuses("seq save his x there", &format!("there{remedy}"));
    let mut name = OsString::from("his/sequences/").into_vec();
    name.push(0xff);
    let arguments = ["import".into(), "there".into(), OsString::from_vec(name)];
    let said = String::from_utf8_lossy(&place.run(arguments).stderr).into_owned();
    assert!(said.contains("the name of a sequence must be UTF-8"), "{said}");
    // A file that may not become longer is refused room as one on a full disk is.
    for line in [
        "seq save his x out",
        "export his/sequences/x out",
        "export his/sequences/x out.safetensors",
    ] {
        let program = env!("CARGO_BIN_EXE_kvfs");
        let script = format!("trap '' XFSZ; ulimit -f 4; exec {program} {line}");
        let mut shell = Command::new("sh");
        let output = shell.args(["-c", &script]).current_dir(place.0.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let to = line.rsplit(' ').next().unwrap();
        assert!(said.starts_with(&format!("kvfs: {to}: File too large")), "{line}: {said}");
    }
}

#[test]
fn a_prompt_has_an_end() {
    let place = Place::new();
    File::create(place.path("sparse")).unwrap().set_len(20 << 30).unwrap();
    let why = "has more than 16777216 bytes: a prompt is at most 4194304 tokens, 4 bytes each";
    for prompt in ["/dev/zero", "sparse"] {
        place.refuses(&format!("match his --tokens {prompt}"), &format!("{prompt}: {why}"));
        place.refuses(&format!("import in his/sequences/y --tokens {prompt}"), why);
    }
}

#[test]
fn what_another_user_has_left_is_in_nobodys_way() {
    require!(root, setpriv);
    let place = Place::new();
    place.give_away();
    let left = place.path("his/sequences/x~");
    fs::create_dir(&left).unwrap();
    fs::set_permissions(&left, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(left.join("tokens"), b"rest").unwrap();
    place.run_as_user("seq add his x 0..3 7").unwrap();
    let aside = place.path("his/sequences/x~1~");
    assert!(aside.join("tokens").exists() && !left.exists());
    let inspected = place.run("inspect his --json".split(' '));
    let said = String::from_utf8_lossy(&inspected.stdout).into_owned();
    assert!(said.contains("\"sequences\": 1"), "{said}");
    place.run_as_user("seq add his x 0..3 -7").unwrap();
    assert!(aside.exists());
    // Numbers that are free between two, and what is no directory.
    fs::create_dir(place.path("his/sequences/x~4~")).unwrap();
    fs::write(place.path("his/sequences/x~7~"), b"").unwrap();
    let added = place.run("seq add his x 0..3 7".split(' '));
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
    for number in [1, 4, 7] {
        assert!(!place.path(&format!("his/sequences/x~{number}~")).exists(), "{number}");
    }
    // Of a sequence that nobody has any more.
    fs::create_dir(place.path("his/sequences/gone~")).unwrap();
    let cleared = place.run("seq clear his --all --yes".split(' '));
    assert!(cleared.status.success(), "{}", String::from_utf8_lossy(&cleared.stderr));
    assert_eq!(fs::read_dir(place.path("his/sequences")).unwrap().count(), 0);
}

#[test]
fn a_sequence_that_may_not_be_written_is_not_changed() {
    require!(root, setpriv);
    let place = Place::new();
    place.give_away();
    let sequence = place.path("his/sequences/x");
    fs::set_permissions(&sequence, fs::Permissions::from_mode(0o500)).unwrap();
    let bytes = || fs::metadata(sequence.join("000/0000000.tail")).unwrap().len();
    let before = bytes();
    for line in ["seq rm his x 50..", "seq clear his x --yes", "seq clear his --all --yes"] {
        let said = place.run_as_user(line).unwrap_err();
        assert!(said.contains("his/sequences/x: Permission denied"), "{line}: {said}");
        assert_eq!(bytes(), before);
        assert!(!place.path("his/sequences/x~").exists(), "{line}");
    }
    let removed = place.run("seq rm his x 50..".split(' '));
    assert!(removed.status.success() && bytes() < before);
}

#[test]
fn who_may_enter_the_directory_finds_a_sequence_by_its_name() {
    require!(root, setpriv);
    let place = Place::new();
    place.give_away();
    let sequences = place.path("his/sequences");
    chown(&sequences, Some(0), Some(0)).unwrap();
    fs::set_permissions(&sequences, fs::Permissions::from_mode(0o711)).unwrap();
    place.run_as_user("seq show his x").unwrap();
    let said = place.run_as_user("seq show his").unwrap_err();
    assert!(said.contains("his/sequences: Permission denied"), "{said}");
}

#[test]
fn what_is_loaded_for_another_user_is_his() {
    require!(root, setpriv);
    let place = Place::new();
    let empty = place.path("his/sequences/e");
    fs::create_dir(&empty).unwrap();
    place.give_away();
    for line in ["seq save private x saved", "seq load his e saved"] {
        let output = place.run(line.split(' '));
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    for name in ["", "000", "000/0000000.tail", "tokens"] {
        let found = empty.join(name).metadata().unwrap();
        assert_eq!((found.uid(), found.gid()), (USER, USER), "{name}");
    }
    place.run_as_user("seq rm his e 50..").unwrap();
    place.run_as_user("seq clear his e --yes").unwrap();
}

#[test]
fn whoever_locks_sequences_holds_up_no_other_model() {
    let place = Place::new();
    let lock = File::open(place.path("his/sequences")).unwrap();
    lock.lock().unwrap();
    let waiting = place.start("model bump his r2 --yes".split(' '));
    let bumped = place.run("model bump private r2 --yes".split(' '));
    assert!(bumped.status.success(), "{}", String::from_utf8_lossy(&bumped.stderr));
    drop(lock);
    let output = waiting.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!place.path("his/sequences/x").exists());
}

#[test]
fn what_is_no_rest_of_a_change_of_revision_stays() {
    let place = Place::new();
    let theirs = place.path("his~");
    fs::create_dir(&theirs).unwrap();
    fs::write(theirs.join(".manifest.json.tmp"), b"{").unwrap();
    fs::write(theirs.join("precious"), b"").unwrap();
    place.refuses("model bump his r2 --yes", "his~: File exists");
    assert!(place.path("his/sequences/x").exists());
    fs::remove_file(theirs.join("precious")).unwrap();
    let bumped = place.run("model bump his r2 --yes".split(' '));
    assert!(bumped.status.success(), "{}", String::from_utf8_lossy(&bumped.stderr));
    assert!(!theirs.exists());
}

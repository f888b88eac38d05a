//! Where the keys of a sealed remote come from: a file, or what a command prints.
//!
//! A file that others can read is refused, since so is the cache that it seals. The command runs
//! before the daemon leaves the terminal, so it may ask for a passphrase. A mount does not wait for
//! ever for a command that hangs: it is killed and the mount refused.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::output::{Failure, Outcome, Report};
use crate::tier::remote::seal::KeyRing;

/// Some keys are a kilobyte; comments have room.
const TEXT_BYTES_MAX: u64 = 64 << 10;
/// A passphrase is typed in a minute, and systemd gives up a mount after 90 s.
const COMMAND_MAX: Duration = Duration::from_secs(60);
/// How often a command that has printed its keys is asked whether it has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Nobody but the owner.
const KEY_MODE: u32 = 0o600;

/// Where keys come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeySource {
    /// `--remote-key`
    File(PathBuf),
    /// `--remote-key-command`, for `sh -c`
    Command(String),
}

impl KeySource {
    /// Of what is set; an error if both are.
    pub(crate) fn of(
        file: Option<PathBuf>, command: Option<String>,
    ) -> Result<Option<KeySource>, String> {
        let file = file.filter(|path| !path.as_os_str().is_empty());
        match (file, command.filter(|command| !command.is_empty())) {
            (Some(_), Some(_)) => {
                Err("remote_key and remote_key_command are both set: give one".to_owned())
            }
            (Some(path), None) if !path.is_absolute() => {
                Err(format!("remote_key {} must be an absolute path", path.display()))
            }
            (file, command) => Ok(file.map(KeySource::File).or(command.map(KeySource::Command))),
        }
    }

    /// Reads the keys.
    pub(crate) fn load(&self) -> Result<KeyRing, String> {
        let (name, text) = match self {
            KeySource::File(path) => (format!("remote_key {}", path.display()), read_file(path)),
            KeySource::Command(command) => {
                (format!("remote_key_command {command:?}"), run(command, COMMAND_MAX))
            }
        };
        let text = text.map_err(|why| format!("{name}: {why}"))?;
        text.parse().map_err(|why| format!("{name}: {why}"))
    }
}

fn read_file(path: &Path) -> Result<String, String> {
    // Without waiting for the writer of a FIFO.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| error.to_string())?;
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("is no regular file".to_owned());
    }
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "mode {mode:04o} lets others at the key: chmod {KEY_MODE:o}, and if it was so for long \
             make another key"
        ));
    }
    read(file)
}

fn run(command: &str, at_most: Duration) -> Result<String, String> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdout(Stdio::piped());
    // What the shell has started is killed with it. At a terminal it stays in the group in front:
    // another one could not ask for a passphrase, and an interrupt would pass it by.
    let has_group = File::open("/dev/tty").is_err();
    if has_group {
        shell.process_group(0);
    }
    let mut child = shell.spawn().map_err(|error| format!("sh: {error}"))?;
    let outcome = printed(&mut child, Instant::now() + at_most).and_then(|printed| {
        printed.ok_or_else(|| {
            format!("was killed: it had not ended after {} s", at_most.as_secs_f64())
        })
    });
    if outcome.is_err() {
        // Neither is wrong if the command has ended meanwhile: its number is taken until the wait.
        let group = i32::try_from(child.id()).map(Pid::from_raw);
        if let (true, Ok(group)) = (has_group, group) {
            let _ = killpg(group, Signal::SIGKILL);
        }
        let _ = child.kill();
        let _ = child.wait();
    }
    let (text, status) = outcome?;
    if status.success() { Ok(text) } else { Err(status.to_string()) }
}

/// All output of a command and how it ended; None if it had not by then.
fn printed(child: &mut Child, until: Instant) -> Result<Option<(String, ExitStatus)>, String> {
    let mut output = child.stdout.take().ok_or("has no output")?;
    let mut bytes = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(output.as_fd(), PollFlags::POLLIN)], left) {
            Ok(0) => return Ok(None),
            Err(Errno::EINTR) => continue,
            outcome => outcome.map_err(|errno| errno.to_string())?,
        };
        let mut part = [0; 4096];
        let count = output.read(&mut part).map_err(|error| error.to_string())?;
        if count == 0 {
            break;
        }
        bytes.extend_from_slice(&part[..count]);
        if bytes.len() as u64 > TEXT_BYTES_MAX {
            break;
        }
    }
    let text = read(bytes.as_slice())?;
    while Instant::now() < until {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            return Ok(Some((text, status)));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(None)
}

fn read(from: impl Read) -> Result<String, String> {
    let mut text = String::new();
    match from.take(TEXT_BYTES_MAX + 1).read_to_string(&mut text) {
        Ok(count) if count as u64 > TEXT_BYTES_MAX => Err("is no key file: too long".to_owned()),
        Ok(_) => Ok(text),
        Err(error) => Err(error.to_string()),
    }
}

/// `kvfs remote keygen`.
pub(crate) fn keygen(path: &Path) -> Outcome {
    let failed =
        |error: io::Error| Failure::failed(format!("key file {}: {error}", path.display()));
    let text = KeyRing::generate().map_err(failed)?;
    let ring: KeyRing = text.parse().map_err(Failure::Failed)?;
    let mut options = OpenOptions::new();
    let options = options.write(true).create_new(true).mode(KEY_MODE);
    let file = options.open(path).map_err(failed)?;
    if let Err(error) = write_durably(file, path, &text) {
        // A part of a key would be in the way of the next attempt.
        let _ = std::fs::remove_file(path);
        return Err(failed(error));
    }
    let id = ring.ids().map(|id| id.to_string()).collect::<String>();
    Ok(Report::text(format!(
        "made key {id} in {}\nkeep a copy elsewhere: what is sealed with a key that is lost is lost\n",
        path.display()
    )))
}

fn write_durably(mut file: File, path: &Path, text: &str) -> io::Result<()> {
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_is_made_once_for_its_owner_alone_and_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        assert!(keygen(&path).unwrap().text.contains("is lost"));
        assert!(keygen(&path).is_err(), "a key is never replaced");
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, KEY_MODE);
        let source = KeySource::File(path.clone());
        let ids: Vec<_> = source.load().unwrap().ids().collect();
        let printed = KeySource::Command(format!("cat {}", path.display()));
        assert_eq!(printed.load().unwrap().ids().collect::<Vec<_>>(), ids);
        for mode in [0o640, 0o604, 0o620, 0o602] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let error = source.load().unwrap_err();
            assert!(error.contains("lets others at the key"), "{error}");
        }
    }

    #[test]
    fn a_command_that_hangs_is_killed_with_what_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let pids = directory.path().join("pids");
        for hanging in ["sleep 600", "sleep 600 & echo $! > PIDS; wait", "exec >&-; sleep 600"] {
            let command = hanging.replace("PIDS", &pids.display().to_string());
            let begun = Instant::now();
            let error = run(&command, Duration::from_millis(300)).unwrap_err();
            assert!(error.contains("had not ended after 0.3 s"), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(10), "{hanging}");
        }
        let endless = "while true; do echo; sleep 0.01; done";
        let error = run(endless, Duration::from_millis(300)).unwrap_err();
        assert!(error.contains("had not ended"), "output does not buy time: {error}");
        // At a terminal what the shell has started is not ours to kill.
        if File::open("/dev/tty").is_err() {
            let pid = std::fs::read_to_string(&pids).unwrap().trim().parse().unwrap();
            let process = crate::cli::process::Process::find(pid);
            assert!(process.is_none_or(|it| it.wait_for_exit(Duration::from_secs(10))));
        }
    }

    #[test]
    fn what_is_no_key_is_refused_in_one_line() {
        fn check(source: &KeySource, expected: &str) {
            let error = source.load().unwrap_err();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
        check(&KeySource::File("/nowhere/key".into()), "No such file");
        check(&KeySource::File("/".into()), "is no regular file");
        check(&KeySource::Command("exit 3".to_owned()), "exit status: 3");
        check(&KeySource::Command("echo hello".to_owned()), "line 1");
        check(&KeySource::Command("yes".to_owned()), "too long");
        let both = KeySource::of(Some("/key".into()), Some("cat /key".to_owned()));
        assert!(both.unwrap_err().contains("give one"));
        assert!(KeySource::of(Some("key".into()), None).unwrap_err().contains("absolute"));
        assert_eq!(KeySource::of(None, Some(String::new())), Ok(None));
    }
}

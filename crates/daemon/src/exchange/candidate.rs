//! The program that is to go on: before anything is given to it, it must say that it can.

use std::ffi::{CStr, CString, OsString};
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::fcntl::AtFlags;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::alarm;

use super::wait;
use kvfs_fs::takeover::{FORMAT, Handover};
use kvfs_os::mountinfo;

/// The command that goes on with a mount, or with `--check` says whether it could.
const COMMAND: &CStr = c"take-over";
/// By which name it is called.
const NAME: &CStr = c"kvfs";

/// A program that has taken the process over and does not serve after this is ended by the kernel: nobody else can end the
/// waiting of those who use the mount.
const SERVES_WITHIN_SECONDS: u32 = 60;

/// How long the program may take to say that it can.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// It says a line.
const ANSWER_BYTES_MAX: u64 = 4096;

/// A program that can go on with the mount. It is held open: what leads to it may lie in the mount, and could not be
/// looked up while nobody serves that.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) program: PathBuf,
    file: File,
    identity: (u64, i64, i64),
    variables: Vec<CString>,
    /// The store and the mountpoint, for whoever looks at the list of processes.
    told: [CString; 2],
}

impl Candidate {
    /// Asks a program whether it can read what this one leaves, and would make the same mount.
    ///
    /// # Errors
    /// It cannot, or says nothing.
    pub(super) fn check(program: PathBuf, asked: &Handover) -> Result<Candidate, String> {
        let place = program.display().to_string();
        if !program.is_absolute() {
            return Err(format!("the program {place} must be given with its whole path"));
        }
        let file = open(&program).map_err(|error| format!("{place}: {error}"))?;
        let found = file.metadata().map_err(|error| format!("{place}: {error}"))?;
        let mounts = mountinfo::read().unwrap_or_default();
        if mountinfo::is_mount_of(&mounts, found.dev(), &asked.launch.store) {
            return Err(format!(
                "{place} lies in the mount itself, which could not be read meanwhile"
            ));
        }
        let answer = ask(&file, asked).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => {
                format!("{place} did not say within {} seconds that it can", ANSWER_MAX.as_secs())
            }
            _ => format!("{place}: {error}"),
        })?;
        let expected = format!("kvfs {} {FORMAT}", COMMAND.to_string_lossy());
        match answer {
            Ok(line) if line.trim_end() == expected => {}
            Ok(_) => return Err(format!("{place} is no kvfs that can go on with this mount")),
            Err(line) if line.is_empty() => {
                return Err(format!(
                    "{place} cannot go on with this mount: it ended with an error"
                ));
            }
            Err(line) => return Err(format!("{place} cannot go on with this mount: {line}")),
        }
        let (identity, variables) = (identity(&found), variables());
        let told = [&asked.launch.store, &asked.launch.mountpoint]
            .map(|path| CString::new(path.as_os_str().as_bytes()).unwrap_or_default());
        Ok(Candidate { program, file, identity, variables, told })
    }

    /// Gives the process to the program, which finds what it goes on with in a descriptor. Comes back only to say why
    /// not.
    pub(super) fn run(&self, descriptor: &CStr) -> io::Error {
        match self.file.metadata() {
            Ok(found) if identity(&found) == self.identity => {}
            Ok(_) => return io::Error::other("it is another program by now: try again"),
            Err(error) => return error,
        }
        take_over(&self.file, descriptor, &self.variables, &self.told)
    }
}

/// Gives this process to a program, which goes on with the mount that the descriptor tells of. The kernel ends it if it does
/// not serve in time. `told` is the store and the mountpoint. Comes back only to say why not.
pub(crate) fn take_over(
    program: &impl AsFd, descriptor: &CStr, variables: &[CString], told: &[CString; 2],
) -> io::Error {
    let [store, mountpoint] = told;
    let arguments = [NAME, COMMAND, descriptor, store, mountpoint];
    alarm::set(SERVES_WITHIN_SECONDS);
    let outcome =
        nix::unistd::execveat(program, c"", &arguments, variables, AtFlags::AT_EMPTY_PATH);
    alarm::cancel();
    match outcome {
        Ok(never) => match never {},
        Err(error) => error.into(),
    }
}

/// Opens a program that is one by itself: the kernel looks for the interpreter of a script by its path.
fn open(program: &Path) -> io::Result<File> {
    let mut file = File::options();
    // A pipe is not waited for.
    let file = file.read(true).custom_flags(libc::O_NONBLOCK).open(program)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let mut beginning = [0; 2];
    if file.read_at(&mut beginning, 0)? == 2 && beginning == *b"#!" {
        return Err(io::Error::other("it is a script: name the program that it runs"));
    }
    Ok(file)
}

fn identity(found: &Metadata) -> (u64, i64, i64) {
    (found.len(), found.mtime(), found.mtime_nsec())
}

/// The variables of this process, as execve(2) takes them.
pub(crate) fn variables() -> Vec<CString> {
    let joined = |(name, value): (OsString, OsString)| {
        CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
    };
    std::env::vars_os().filter_map(joined).collect()
}

/// What the program says, or the line in which it complains.
fn ask(program: &File, asked: &Handover) -> io::Result<Result<String, String>> {
    let mut question = File::from(memfd_create(c"kvfs-question", MFdFlags::MFD_CLOEXEC)?);
    question.write_all(&asked.to_bytes())?;
    question.seek(SeekFrom::Start(0))?;
    let output = || memfd_create(c"kvfs-answer", MFdFlags::MFD_CLOEXEC).map(File::from);
    let (mut said, mut complained) = (output()?, output()?);
    // Not by the name that it was found by, which may be one of the mount helpers.
    let mut child = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()))
        .arg0(NAME.to_string_lossy().as_ref())
        .arg(COMMAND.to_string_lossy().as_ref())
        .arg("--check")
        .current_dir("/")
        .stdin(question)
        .stdout(Stdio::from(said.try_clone()?))
        .stderr(Stdio::from(complained.try_clone()?))
        .spawn()?;
    let is_well = wait(&mut child, ANSWER_MAX)?;
    let output = if is_well { &mut said } else { &mut complained };
    output.seek(SeekFrom::Start(0))?;
    let mut bytes = Vec::new();
    output.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if is_well {
        return Ok(Ok(text));
    }
    Ok(Err(complaint(&text).to_owned()))
}

/// The line that says why, which may have a log before it and advice behind it.
fn complaint(text: &str) -> &str {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let is_error = |line: &&str| ["error: ", "kvfs: "].iter().any(|by| line.starts_with(by));
    lines.clone().find(is_error).or_else(|| lines.next_back()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_what_a_program_complains_the_line_that_says_why_is_told() {
        for (text, told) in [
            ("", ""),
            ("\n \n", ""),
            ("not this\n  it has no room \n\n", "it has no room"),
            ("[WARN] slow\nkvfs: the format is newer\n", "kvfs: the format is newer"),
            (
                "error: unrecognized subcommand 'take-over'\n\nUsage: kvfs\n\nFor more, try '--help'.\n",
                "error: unrecognized subcommand 'take-over'",
            ),
        ] {
            assert_eq!(complaint(text), told);
        }
    }
}

//! What a daemon may have of a machine: whatever limits whoever mounts has, it takes all that it may, and says so if that
//! is too little.

use kvfs_daemon::OPEN_FILES_MIN;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

/// A store's own files become as long: packs and the reserve are shorter, its database has some 2 GiB for a million pages.
const OWN_FILE_BYTES_MIN: u64 = 1 << 30;

/// Every open file of a client may be one here too; the default of 1024 is less than one sequence.
const OPEN_FILES: u64 = 1 << 20;

/// Raises the limits of this process for a mount.
///
/// # Errors
/// A line that says which of them is too low.
pub(super) fn raise(is_read_only: bool) -> Result<(), String> {
    let file_size = raise_file_size();
    raise_open_files()?;
    if is_read_only { Ok(()) } else { file_size }
}

/// Clients may write long files.
fn raise_file_size() -> Result<(), String> {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_FSIZE) else { return Ok(()) };
    let is_lifted = || setrlimit(Resource::RLIMIT_FSIZE, RLIM_INFINITY, RLIM_INFINITY).is_ok();
    // Only root may raise the hard limit; everybody may use all of it.
    if soft == RLIM_INFINITY || is_lifted() {
        return Ok(());
    }
    if hard < OWN_FILE_BYTES_MIN {
        return Err(format!(
            "a file may have {hard} bytes at most here (ulimit -f), and a store's own become longer: allow \
             {OWN_FILE_BYTES_MIN} at least"
        ));
    }
    let raised = setrlimit(Resource::RLIMIT_FSIZE, hard, hard);
    raised.map_err(|error| format!("the limit of a file's length cannot be raised: {error}"))
}

fn raise_open_files() -> Result<(), String> {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Ok(()) };
    let more = hard.max(OPEN_FILES);
    if setrlimit(Resource::RLIMIT_NOFILE, more, more).is_ok() {
        return Ok(());
    }
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(error) => {
            log::warn!("the limit of open files stays as it is: {error}");
            soft
        }
    };
    if limit < OPEN_FILES_MIN {
        return Err(format!(
            "a process may have {limit} files open here (ulimit -Hn), and a mount needs more: allow {OPEN_FILES_MIN} at \
             least"
        ));
    }
    Ok(())
}

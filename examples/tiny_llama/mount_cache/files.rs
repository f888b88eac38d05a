//! What every file of a sequence needs.

use std::error::Error;
use std::fs;
use std::io;
use std::path::Path;

use crate::Result;

/// Says which file an error is about.
pub(super) fn about(path: &Path) -> impl Fn(io::Error) -> Box<dyn Error + Send + Sync> {
    move |error| format!("{}: {error}", path.display()).into()
}

/// Gives a file its name when all of its bytes are there.
#[expect(
    clippy::disallowed_methods,
    reason = "an engine renames as any program does; kvfs publishes"
)]
pub(super) fn publish(directory: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let temporary = directory.join(format!(".{name}.tmp"));
    let path = directory.join(name);
    let renamed = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, &path));
    renamed.map_err(|error| {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary);
        about(&path)(error)
    })
}

/// Removes a file that may be gone already.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(about(path)(error)),
        _ => Ok(()),
    }
}

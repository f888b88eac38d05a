//! Before something is deleted at one word: how much it is, and whether that is meant.

use std::io::{self, BufRead, IsTerminal};
use std::path::Path;

use clap::Args;

use super::output::{Failure, note};

/// How a command that deletes is told to go ahead.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Consent {
    /// Only say what would be deleted
    #[arg(long)]
    pub dry_run: bool,
    /// Delete without asking
    #[arg(long, short = 'y', conflicts_with = "dry_run")]
    pub yes: bool,
}

impl Consent {
    /// Whether to delete what `what` describes. Who is not at a terminal must have said so before.
    pub(crate) fn is_given(self, what: &str) -> Result<bool, Failure> {
        if self.dry_run {
            return Ok(false);
        }
        if self.yes {
            return Ok(true);
        }
        // Errors and questions have one line.
        let what = what.replace('\n', "; ");
        if !io::stdin().is_terminal() {
            return Err(Failure::Usage(format!("{what}: add --yes to do it, --dry-run to look")));
        }
        note(&format!("kvfs: {what}. Go on? [y/N]"));
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer).map_err(Failure::failed)?;
        let is_yes = matches!(answer.trim(), "y" | "Y" | "yes");
        if is_yes { Ok(true) } else { Err(Failure::Failed("nothing was deleted".to_owned())) }
    }
}

/// Files below a directory, and their bytes. Names that are links count as they are.
pub(crate) fn size_below(directory: &Path) -> io::Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        let Some(entries) = there(&directory, directory.read_dir())? else { continue };
        for entry in entries {
            let Some(entry) = there(&directory, entry)? else { continue };
            let path = entry.path();
            if there(&path, entry.file_type())?.is_some_and(|kind| kind.is_dir()) {
                directories.push(path);
            } else if let Some(metadata) = there(&path, entry.metadata())? {
                files += 1;
                bytes += metadata.len();
            }
        }
    }
    Ok((files, bytes))
}

/// What was found of a file, unless somebody has removed it meanwhile; any other error tells of which.
fn there<T>(path: &Path, found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE)) => Ok(None),
        Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_removes_meanwhile_counts_for_nothing() {
        let base = tempfile::tempdir().unwrap();
        assert_eq!(size_below(&base.path().join("gone")).unwrap(), (0, 0));
        std::fs::create_dir(base.path().join("below")).unwrap();
        std::fs::write(base.path().join("below/file"), "four").unwrap();
        assert_eq!(size_below(base.path()).unwrap(), (1, 4));
        let file = base.path().join("below/file");
        let failed = size_below(&file).unwrap_err().to_string();
        assert!(failed.starts_with(&format!("{}: ", file.display())), "{failed}");
    }
}

//! Where a map asks for directories: through the kernel, or, by the daemon, of the mount itself.

use std::cell::Cell;
use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use crate::fs::FsError;
use crate::fuse::Look;
use crate::page::Manifest;
use crate::page::names::MANIFEST;
use crate::sys;

/// Pages of a map that the daemon makes: such a map takes a second or two.
const PAGES_MAX: usize = 100_000;

/// Directories of a mount.
pub(in crate::cli) trait Tree {
    /// The manifest of a model; `None` where there is none.
    fn manifest(&self, model: &Path) -> io::Result<Option<Manifest>>;

    /// Names of the directories in one.
    fn directories(&self, path: &Path) -> io::Result<Vec<OsString>>;

    /// An extended attribute; `None` where there is none.
    fn attribute(&self, path: &Path, name: &str) -> io::Result<Option<Vec<u8>>>;

    /// So many pages more: fails where these are too many, or take too long.
    fn take(&self, pages: usize) -> io::Result<()>;
}

/// Through the kernel.
#[derive(Debug)]
pub(super) struct Kernel;

impl Tree for Kernel {
    fn manifest(&self, model: &Path) -> io::Result<Option<Manifest>> {
        let path = model.join(MANIFEST);
        if !path.is_file() {
            return Ok(None);
        }
        Manifest::parse(&std::fs::read(path)?)
            .map(Some)
            .map_err(|error| io::Error::other(format!("{MANIFEST}: {error}")))
    }

    fn directories(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in path.read_dir()? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                names.push(entry.file_name());
            }
        }
        Ok(names)
    }

    fn attribute(&self, path: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
        sys::long_extended_attribute(path, &CString::new(name)?)
    }

    fn take(&self, _pages: usize) -> io::Result<()> {
        Ok(())
    }
}

/// By the daemon, for as long as a look may take.
#[derive(Debug)]
pub(in crate::cli) struct Inside<'a> {
    look: &'a Look<'a>,
    pages: Taken,
}

/// Pages of a map so far.
#[derive(Debug, Default)]
struct Taken(Cell<usize>);

impl Taken {
    fn add(&self, pages: usize) -> io::Result<()> {
        self.0.set(self.0.get().saturating_add(pages));
        if self.0.get() <= PAGES_MAX {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "there are more than {PAGES_MAX} pages, too many for a browser: kvfs map draws them"
        )))
    }
}

impl<'a> Inside<'a> {
    pub(in crate::cli) fn new(look: &'a Look<'a>) -> Inside<'a> {
        Inside { look, pages: Taken::default() }
    }

    fn go_on(&self) -> io::Result<()> {
        self.look.refusal().map_or(Ok(()), |why| Err(io::Error::other(why)))
    }
}

impl Tree for Inside<'_> {
    fn manifest(&self, model: &Path) -> io::Result<Option<Manifest>> {
        let model = self.look.looker.model(model).map_err(|error| errno(&error))?;
        Ok(model.map(|model| model.manifest.clone()))
    }

    fn directories(&self, path: &Path) -> io::Result<Vec<OsString>> {
        self.go_on()?;
        let (names, is_all) = self.look.looker.directories(path).map_err(|error| errno(&error))?;
        if is_all {
            Ok(names.into_iter().map(OsString::from_vec).collect())
        } else {
            let why = format!("has more than {} names: kvfs map draws them all", names.len());
            Err(io::Error::other(why))
        }
    }

    fn attribute(&self, path: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
        match self.look.looker.pages(path, name.as_bytes()) {
            Err(FsError::NoAttribute) => Ok(None),
            outcome => outcome.map(Some).map_err(|error| errno(&error)),
        }
    }

    fn take(&self, pages: usize) -> io::Result<()> {
        self.pages.add(pages)?;
        self.go_on()
    }
}

fn errno(error: &FsError) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_thousand_pages_are_drawn_and_no_more() {
        let taken = Taken::default();
        for _ in 0..PAGES_MAX / 250 {
            taken.add(250).unwrap();
        }
        let line = taken.add(1).unwrap_err().to_string();
        assert!(line.contains("more than 100000 pages"), "{line}");
        assert!(taken.add(usize::MAX).is_err());
    }
}

//! Bytes of a file that others may rewrite meanwhile. The state tells its object and is not held while that is opened; the
//! object of a version that no commit has seen may be gone by then.

use std::io::ErrorKind;

use crate::FsError;
use crate::core::Core;
use crate::core::state::State;
use kvfs_page::names;
use kvfs_storage::store::disk::{Access, DiskFile};
use kvfs_storage::store::record::{InodeId, ObjectId};

/// Opens the object that `find` tells, for reading; `None` if it tells none. It is asked again where that object is gone.
///
/// # Errors
/// Those of `find` and of the disk; [`ErrorKind::NotFound`] if it tells of an object that is gone once more.
pub(crate) fn open_latest(
    core: &Core, mut find: impl FnMut(&mut State) -> Result<Option<ObjectId>, FsError>,
) -> Result<Option<Box<dyn DiskFile>>, FsError> {
    let mut missing = None;
    loop {
        let Some(object) = find(&mut core.state())? else { return Ok(None) };
        match core.store.open_object(object, Access::Read) {
            Err(error) if error.kind() == ErrorKind::NotFound && missing != Some(object) => {
                missing = Some(object);
            }
            outcome => return Ok(Some(outcome?)),
        }
    }
}

/// The same of the token file of a sequence.
///
/// # Errors
/// As there.
pub(crate) fn open_tokens(
    core: &Core, sequence: InodeId,
) -> Result<Option<Box<dyn DiskFile>>, FsError> {
    open_latest(core, |state| {
        let Some(entry) = state.entry(sequence, names::TOKENS.as_bytes())? else {
            return Ok(None);
        };
        Ok(state.inode(entry.inode)?.file().and_then(|file| file.object))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted};

    /// Larger than what is put into packs.
    static BYTES: [u8; 70_000] = [7; 70_000];

    #[test]
    fn what_is_gone_is_looked_for_again_where_it_was_rewritten() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        let object = |name: &str| {
            let id = unmounted.write(FILES, name, &BYTES);
            core.state().inode(id).unwrap().file().unwrap().object.unwrap()
        };
        let [before, after, there] = ["before", "after", "there"].map(object);
        for object in [before, after] {
            core.store.remove_object(object).unwrap();
        }
        let open = |versions: &[Option<ObjectId>]| {
            let mut versions = versions.iter();
            open_latest(core, |_| Ok(*versions.next().unwrap()))
        };
        let length = |file: Option<Box<dyn DiskFile>>| file.map(|file| file.stat().unwrap().length);
        let found = Some(BYTES.len() as u64);
        assert_eq!(length(open(&[Some(there)]).unwrap()), found);
        assert_eq!(length(open(&[Some(before), Some(after), Some(there)]).unwrap()), found);
        assert_eq!(length(open(&[Some(before), None]).unwrap()), None);
        let lost = open(&[Some(before), Some(before)]).unwrap_err();
        assert!(matches!(lost, FsError::Io(error) if error.kind() == ErrorKind::NotFound));
    }
}

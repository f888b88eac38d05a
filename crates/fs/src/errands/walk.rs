//! One errand on its way through what is below a directory.
//!
//! The state is held for some names at a time, and let go for each file. What moves or appears behind the walk is not met; what is
//! met twice is done twice, which changes nothing.

use super::{Errand, finish};
use crate::core::rights::User;
use crate::prefixes::Share;
use crate::{Caller, FileSystem, FsError};
use kvfs_page::names::{LayerEntry, layer_entry};
use kvfs_storage::store::record::{DirectoryClass, InodeId, Kind};

/// Names of one step, which is some milliseconds unless bytes must come from elsewhere.
const NAMES_AT_ONCE: usize = 64;

/// An errand, and how far it is.
#[derive(Debug)]
pub(super) struct Task {
    /// What the attribute was set of.
    pub(super) asked: InodeId,
    pub(super) errand: Errand,
    /// Who asks.
    caller: Caller,
    frames: Vec<Frame>,
    _share: Share,
}

/// A directory that is being read.
#[derive(Clone, Copy, Debug)]
struct Frame {
    directory: InodeId,
    offset: u64,
    /// Only pages that end before this token, or at it.
    end: Option<End>,
}

/// Where a prefix ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) tokens: u64,
    pub(crate) page_tokens: u64,
}

impl End {
    /// Whether a name in a layer is about tokens before it.
    fn reaches(self, name: &[u8]) -> bool {
        match layer_entry(name) {
            LayerEntry::Page(start) => start.0.saturating_add(self.page_tokens) <= self.tokens,
            LayerEntry::State(row) => row.0 <= self.tokens,
            LayerEntry::Tail(_) | LayerEntry::Staging | LayerEntry::Other => false,
        }
    }
}

impl Task {
    pub(super) fn new((asked, errand): (InodeId, Errand), caller: Caller, share: Share) -> Task {
        Task { asked, errand, caller, frames: Vec::new(), _share: share }
    }

    /// Everything below a directory is to be met.
    pub(super) fn enter(&mut self, directory: InodeId) {
        self.frames.push(Frame { directory, offset: 0, end: None });
    }

    /// The pages of sequences up to a token.
    pub(super) fn enter_prefix(
        &mut self, fs: &FileSystem, places: &[(InodeId, End)],
    ) -> Result<(), FsError> {
        let state = fs.core.state();
        for (sequence, end) in places {
            state.directory(*sequence)?;
            self.frames.push(Frame { directory: *sequence, offset: 0, end: Some(*end) });
        }
        Ok(())
    }

    /// One step; whether there is more to do.
    pub(super) fn advance(&mut self, fs: &FileSystem) -> Result<bool, FsError> {
        let Some(frame) = self.frames.last().copied() else { return Ok(false) };
        if matches!(self.errand, Errand::Pin(_)) {
            fs.pacing().throttle()?;
        }
        let mut found = Vec::new();
        let (mut last, mut next) = (None, None);
        fs.core.state().metadata.entries(
            frame.directory,
            frame.offset,
            |offset, name, entry| {
                // Names of one offset stay together.
                if found.len() >= NAMES_AT_ONCE && last != Some(offset) {
                    next = Some(offset);
                    return false;
                }
                found.push((name.to_vec(), entry.inode));
                last = Some(offset);
                true
            },
        )?;
        match (next, self.frames.last_mut()) {
            (Some(offset), Some(frame)) => frame.offset = offset,
            _ => drop(self.frames.pop()),
        }
        for (name, id) in found {
            self.meet(fs, frame, &name, id)?;
        }
        Ok(!self.frames.is_empty())
    }

    /// A name was met: of a directory what is in it comes next, and to a file it is done, if it is the asker's.
    fn meet(
        &mut self, fs: &FileSystem, frame: Frame, name: &[u8], id: InodeId,
    ) -> Result<(), FsError> {
        let Some(inode) = fs.core.state().metadata.inode(id)? else { return Ok(()) };
        if let Kind::Directory { parent, class, .. } = inode.kind {
            let is_layer = matches!(class, DirectoryClass::Layer(_));
            let is_inside = frame.end.is_none() || is_layer;
            // Forged names may form a ring: a directory is only in the one above it.
            if parent == frame.directory && is_inside && self.user().may_enter(&inode) {
                self.frames.push(Frame { directory: id, offset: 0, end: frame.end });
            }
            return Ok(());
        }
        let is_own = [0, inode.uid].contains(&self.caller.uid);
        let is_meant = frame.end.is_none_or(|end| end.reaches(name));
        if inode.file().is_none() || !is_own || !is_meant {
            return Ok(());
        }
        let outcome = match self.errand {
            Errand::Finish(is_finished) => {
                let state = fs.core.state();
                if let Some(inode) = state.metadata.inode(id)? {
                    finish(fs.residency(), &state, (id, &inode), is_finished);
                }
                Ok(())
            }
            Errand::Pin(is_pinned) if is_pinned == fs.core.state().is_pinned(id)? => Ok(()),
            Errand::Pin(true) => fs.pins().set(id, b"1"),
            Errand::Pin(false) => fs.pins().set(id, b"0"),
            Errand::Move(tier) => fs.movement().set_tier(id, tier.name().as_bytes()),
        };
        match outcome {
            Err(error) if concerns_all(&error) => Err(error),
            // It went, is in use, or is of a kind that does not move: that is the file's affair.
            _ => Ok(()),
        }
    }

    fn user(&self) -> User {
        User::from(self.caller)
    }
}

/// Whether there is no use in going on with the next file: each would wait as long in vain.
fn concerns_all(error: &FsError) -> bool {
    use kvfs_storage::tier::remote::RemoteError::{Denied, Key, Timeout, Unreachable};
    match error {
        FsError::Store(_) | FsError::ReadOnly => true,
        FsError::Remote(error) => {
            matches!(error, Unreachable(_) | Timeout(_) | Denied(_) | Key(_))
        }
        _ => false,
    }
}

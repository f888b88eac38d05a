//! Extended attributes: the user's own, kept with the inode, and `user.kvfs.*`, which tell where
//! and how a file is stored. The latter are never listed, so that `rsync -X` does not try to copy
//! them back.

use super::attributes::Caller;
use super::damage::known::KNOWN_DAMAGE;
use super::foreign::ORIGIN;
use super::hits::rate::{self, PREFILL_RATE};
use super::prefixes::{SLOT_KEY, key_bytes};
use super::retention::{self, AGE, QUOTA, TTL, USED};
use super::scrub::SCRUBBED;
use super::{FileSystem, FsError, errands, leave, placement};
use crate::core::state::State;
use kvfs_page::Checksum;
use kvfs_page::reader_report::{self, Counts};
use kvfs_storage::store::record::{Inode, InodeId, Role, Time};

/// What the daemon answers itself.
const OWN_PREFIX: &[u8] = b"user.kvfs.";
/// Where a file is; setting it asks for a move.
pub(crate) const TIER: &[u8] = b"user.kvfs.tier";
/// Attributes for those who run the machine: the kernel lets others neither read nor set them (xattr(7)).
const TRUSTED_PREFIX: &[u8] = b"trusted.";
/// What a file that is to move waits for.
const MOVING: &[u8] = b"user.kvfs.moving";
/// A file that stays. Stored.
pub(crate) const PIN: &[u8] = b"user.kvfs.pin";
/// What a page's values were rounded to, if they were. Stored, and set by the daemon alone.
pub(super) const LOSSY: &[u8] = b"user.kvfs.lossy";
/// Of the root: setting it starts a collection of garbage.
pub(super) const GC: &[u8] = b"user.kvfs.gc";
/// Setting it starts a scrub of what is below; of the root it tells how far that is.
const SCRUB: &[u8] = b"user.kvfs.scrub";
/// Limits of the kernel (`XATTR_SIZE_MAX`).
const VALUE_BYTES_MAX: usize = 64 << 10;
/// Names and values of one inode together: each change of one looks at all of them. ext4 has room for
/// 4 KiB, XFS for some hundred KiB before it gets slow.
const ALL_BYTES_MAX: usize = 1 << 20;

/// One attribute, for somebody who may not be told each.
pub fn extended_attribute_for(
    fs: &FileSystem, id: InodeId, name: &[u8], caller: Caller,
) -> Result<Vec<u8>, FsError> {
    if placement::is_asked(name) {
        return placement::tell(fs, id, name, caller);
    }
    retention::check_reader(&fs.core, id, name, caller)?;
    fs.extended_attribute(id, name)
}

/// Sets an attribute for somebody: of everything below a directory, if it is one that can be.
pub fn set_extended_attribute_for(
    fs: &FileSystem, id: InodeId, (name, value, flags): (&[u8], &[u8], i32), caller: Caller,
) -> Result<(), FsError> {
    if errands::ask_below(fs, id, (name, value), caller)? {
        return Ok(());
    }
    fs.set_extended_attribute(id, name, value, flags)
}

impl FileSystem {
    /// One attribute.
    pub fn extended_attribute(&self, id: InodeId, name: &[u8]) -> Result<Vec<u8>, FsError> {
        if name == MOVING && self.errands.are_under_way(id) {
            return Ok(b"walking".to_vec());
        }
        if super::is_virtual(id) {
            return Err(FsError::NoAttribute);
        }
        if name == errands::HINT {
            return errands::hint_of(self, id);
        }
        if let Some(own) = name.strip_prefix(OWN_PREFIX) {
            return own_attribute(self, id, own);
        }
        check_namespace(name)?;
        self.core.state().metadata.attribute(id, name)?.ok_or(FsError::NoAttribute)
    }

    /// Names of a file's attributes that a caller may ask for, each followed by a zero byte.
    pub fn list_extended_attributes(
        &self, id: InodeId, caller: Caller,
    ) -> Result<Vec<u8>, FsError> {
        if super::is_virtual(id) {
            return Ok(Vec::new());
        }
        let mut names = Vec::new();
        for name in self.core.state().metadata.attribute_names(id)? {
            if name == PIN
                || name == LOSSY
                || name == SLOT_KEY
                || name == ORIGIN
                || name == USED
                || name == PREFILL_RATE
                || name == SCRUBBED
                || name == KNOWN_DAMAGE
                || retention::is_limit(&name)
                || caller.uid != 0 && name.starts_with(TRUSTED_PREFIX)
            {
                continue;
            }
            names.extend_from_slice(&name);
            names.push(0);
        }
        Ok(names)
    }

    /// Sets an attribute; `flags` are those of setxattr(2).
    pub fn set_extended_attribute(
        &self, id: InodeId, name: &[u8], value: &[u8], flags: i32,
    ) -> Result<(), FsError> {
        check_namespace(name)?;
        if super::is_virtual(id) {
            return Err(FsError::Unsupported);
        }
        if name == reader_report::ATTRIBUTE.as_bytes() {
            return add_report(self, id, value);
        }
        if name.starts_with(OWN_PREFIX) {
            return match name {
                TIER => self.movement().set_tier(id, value),
                PIN => self.pins().set(id, value),
                SCRUB => self.scrubs.ask(id, value),
                QUOTA | AGE | TTL => self.retention.set_limit(&self.core, id, name, value),
                PREFILL_RATE => rate::set(&self.core, id, value),
                _ => Err(FsError::Unsupported),
            };
        }
        if value.len() > VALUE_BYTES_MAX {
            return Err(FsError::AttributeTooLarge);
        }
        self.pacing().throttle()?;
        let mut state = self.core.state_to_change()?;
        let mut inode = state.inode(id)?;
        let exists = state.metadata.attribute(id, name)?.is_some();
        if exists && flags & libc::XATTR_CREATE != 0 {
            return Err(FsError::Exists);
        }
        if !exists && flags & libc::XATTR_REPLACE != 0 {
            return Err(FsError::NoAttribute);
        }
        let others = state.metadata.attribute_bytes(id, name)?;
        if others + name.len() + value.len() > ALL_BYTES_MAX {
            return Err(FsError::NoRoom);
        }
        let life = state.metadata.life(id);
        state.metadata.put_attribute(life, id, name, value);
        inode.ctime = Time::now();
        state.put_inode(id, &inode);
        Ok(())
    }

    /// Removes an attribute.
    pub fn remove_extended_attribute(&self, id: InodeId, name: &[u8]) -> Result<(), FsError> {
        check_namespace(name)?;
        match name {
            TIER => return self.movement().withdraw_wish(id),
            PIN => return self.pins().remove(id),
            QUOTA | AGE | TTL => return self.retention.remove_limit(&self.core, id, name),
            LOSSY | ORIGIN | USED | SCRUBBED | KNOWN_DAMAGE => return Err(FsError::Unsupported),
            _ => {}
        }
        let mut state = self.core.state_to_change()?;
        if super::is_virtual(id) {
            return Err(FsError::NoAttribute);
        }
        state.remove_attribute(id, name).map(drop)
    }
}

fn own_attribute(fs: &FileSystem, id: InodeId, name: &[u8]) -> Result<Vec<u8>, FsError> {
    if name == b"gc" && id == InodeId::ROOT {
        return Ok(fs.collection.report()?.into_bytes());
    }
    if name == b"scrub" && id == InodeId::ROOT {
        return Ok(fs.scrubs.report().into_bytes());
    }
    if name == b"slot_key" {
        return key_bytes(&fs.core, id);
    }
    if name == b"moving" {
        return Ok(fs.movement().waits_for(id)?.as_bytes().to_vec());
    }
    let stored = match name {
        b"quota" => Some(QUOTA),
        b"age" => Some(AGE),
        b"ttl" => Some(TTL),
        b"prefill_rate" => Some(PREFILL_RATE),
        _ => None,
    };
    if let Some(stored) = stored {
        return fs.core.state().metadata.attribute(id, stored)?.ok_or(FsError::NoAttribute);
    }
    if name == b"used_bytes" {
        let bytes = fs.retention.limited_bytes(id).ok_or(FsError::NoAttribute)?;
        return Ok(bytes.to_string().into_bytes());
    }
    if name == b"rank" {
        return Ok(leave::rank(fs, id)?.into_bytes());
    }
    let state = fs.core.state();
    let inode = state.inode(id)?;
    let file = inode.file().ok_or(FsError::NoAttribute)?;
    let text = match name {
        b"tier" => {
            let object = state.current_object(id, file).ok_or(FsError::NoAttribute)?;
            fs.residency().whereabouts(&state, object)?.word().to_owned()
        }
        b"encoding" | b"stored_bytes" => {
            let object = state.current_object(id, file).ok_or(FsError::NoAttribute)?;
            match (name, fs.residency().whereabouts(&state, object)?.stored()) {
                (b"encoding", Some((encoding, _))) => encoding.to_owned(),
                (b"encoding", None) => "raw".to_owned(),
                (_, Some((_, stored_bytes))) => stored_bytes.to_string(),
                (_, None) => state.attributes_of(&fs.core.store, id, &inode)?.size.to_string(),
            }
        }
        b"served_by" => if fs.core.is_passthrough() { "kernel" } else { "daemon" }.to_owned(),
        b"checksum" => {
            let object = file.object.ok_or(FsError::NoAttribute)?;
            let stored = state.metadata.object(object)?.and_then(|record| record.checksum);
            match file.role {
                Role::Page(page) if !page.is_state() => Checksum(page.checksum).to_string(),
                _ => Checksum(stored.ok_or(FsError::NoAttribute)?).to_string(),
            }
        }
        b"damaged" if state.is_known_damaged(id) => "yes".to_owned(),
        b"pin" => return state.metadata.attribute(id, PIN)?.ok_or(FsError::NoAttribute),
        b"origin" => state.origin_of(id)?.ok_or(FsError::NoAttribute)?.store.to_string(),
        b"lossy" => return state.metadata.attribute(id, LOSSY)?.ok_or(FsError::NoAttribute),
        _ => return Err(FsError::NoAttribute),
    };
    Ok(text.into_bytes())
}

/// What somebody who reads the sequence in a directory has counted since the last time.
fn add_report(fs: &FileSystem, id: InodeId, report: &[u8]) -> Result<(), FsError> {
    if !fs.core.state().inode(id)?.is_directory() {
        return Err(FsError::Unsupported);
    }
    let counts = Counts::parse(report).map_err(|_| FsError::Invalid)?;
    fs.core.observer.attended(&counts);
    Ok(())
}

impl State {
    /// Removes a stored attribute; whose it was.
    pub(super) fn remove_attribute(&mut self, id: InodeId, name: &[u8]) -> Result<Inode, FsError> {
        if self.metadata.attribute(id, name)?.is_none() {
            return Err(FsError::NoAttribute);
        }
        let mut inode = self.inode(id)?;
        let life = self.metadata.life(id);
        self.metadata.remove_attribute(life, id, name);
        inode.ctime = Time::now();
        self.put_inode(id, &inode);
        Ok(inode)
    }
}

/// Only `user.*` and `trusted.*` are kept. A plain "unsupported" for the others lets `ls -l` stop
/// asking for ACLs and labels after the first file of a directory.
fn check_namespace(name: &[u8]) -> Result<(), FsError> {
    let kept = name.starts_with(b"user.") || name.starts_with(TRUSTED_PREFIX);
    if kept { Ok(()) } else { Err(FsError::Unsupported) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted};

    #[test]
    fn names_of_the_administrator_are_listed_to_him_only() {
        let unmounted = Unmounted::new();
        let id = unmounted.write(FILES, "file", b"bytes");
        for name in [b"trusted.secret".as_slice(), b"user.note"] {
            unmounted.fs.set_extended_attribute(id, name, b"value", 0).unwrap();
        }
        let listed = |uid| {
            let names = unmounted.fs.list_extended_attributes(id, Caller { uid, gid: uid });
            String::from_utf8(names.unwrap()).unwrap()
        };
        assert_eq!(listed(0), "trusted.secret\0user.note\0");
        assert_eq!(listed(1000), "user.note\0");
    }
}

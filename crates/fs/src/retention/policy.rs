//! Limits, kept as extended attributes of directories: so they are durable, and part of the names in
//! the remote. They are not listed, so that copies do not have them.
//!
//! | attribute | on | removes |
//! |---|---|---|
//! | `user.kvfs.quota` | directories | beyond so many bytes, what was used longest ago |
//! | `user.kvfs.age` | directories | what was not used for so many seconds |
//! | `user.kvfs.ttl` | directories, files | what was written so many seconds ago; a file's own counts |
//!
//! With `renewed` behind the number a time to live begins anew with each use, as an age does. Nothing more is written for that at
//! an open: uses are noted in memory anyway.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Retention;
use crate::core::Core;
use crate::core::state::State;
use crate::extended::{PIN, TIER};
use crate::{Caller, FsError};
use kvfs_storage::store::StoreError;
use kvfs_storage::store::metadata::Attribute;
use kvfs_storage::store::record::{DirectoryClass, Inode, InodeId, Kind, Role, Time};

pub(crate) const QUOTA: &[u8] = b"user.kvfs.quota";
pub(crate) const AGE: &[u8] = b"user.kvfs.age";
pub(crate) const TTL: &[u8] = b"user.kvfs.ttl";

/// Behind the number of a time to live: uses begin it anew.
const RENEWED: &str = "renewed";
/// Of a directory with a limit: what the last walk found below it.
const USED_BYTES: &[u8] = b"user.kvfs.used_bytes";

/// A thousand years: what is longer is a mistake, and sums of times stay in range.
const SECONDS_MAX: u64 = 1000 * 366 * 86_400;

/// What holds for a directory and everything below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Policy {
    pub(super) bytes: Option<u64>,
    /// Since the last use.
    pub(super) age: Option<Duration>,
    /// Since the last change.
    pub(super) ttl: Option<Ttl>,
}

/// A time so much later.
pub(super) fn after(time: Time, duration: Duration) -> Time {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Time { seconds: time.seconds.saturating_add(seconds), ..time }
}

/// A time to live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ttl {
    lasts: Duration,
    /// A use begins it anew.
    pub(super) is_renewed: bool,
}

impl Ttl {
    /// When it is over for what was changed and used for the last time then.
    pub(super) fn end(self, changed: Time, used: Time) -> Time {
        after(if self.is_renewed { changed.max(used) } else { changed }, self.lasts)
    }
}

/// A limit as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    number: u64,
    is_renewed: bool,
}

impl Limit {
    fn duration(self) -> Duration {
        Duration::from_secs(self.number)
    }

    pub(super) fn ttl(self) -> Ttl {
        Ttl { lasts: self.duration(), is_renewed: self.is_renewed }
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}", self.number)?;
        if self.is_renewed { write!(formatter, " {RENEWED}") } else { Ok(()) }
    }
}

impl Policy {
    fn set(&mut self, name: &[u8], value: Option<Limit>) {
        match name {
            QUOTA => self.bytes = value.map(|limit| limit.number),
            AGE => self.age = value.map(Limit::duration),
            _ => self.ttl = value.map(Limit::ttl),
        }
    }
}

impl std::fmt::Display for Policy {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = |duration: Option<Duration>| duration.map(|duration| duration.as_secs());
        let ttl = self.ttl.map(|ttl| ttl.lasts);
        let renewed = self.ttl.filter(|ttl| ttl.is_renewed).map(|_| 1);
        let limits = [
            ("size", self.bytes),
            ("age", seconds(self.age)),
            ("ttl", seconds(ttl)),
            ("ttl_renewed", renewed),
        ];
        let given: Vec<String> = limits
            .into_iter()
            .filter_map(|(name, limit)| limit.map(|limit| format!("{name}={limit}")))
            .collect();
        formatter.write_str(&given.join(" "))
    }
}

/// The limits of a mount.
#[derive(Debug, Default)]
pub(super) struct Policies {
    pub(super) directories: BTreeMap<InodeId, Policy>,
    /// Files that have a time to live of their own; 16 bytes each.
    pub(super) files: BTreeSet<InodeId>,
}

impl Policies {
    fn note(&mut self, id: InodeId, is_directory: bool, name: &[u8], value: Option<Limit>) {
        if !is_directory {
            match value {
                Some(_) => self.files.insert(id),
                None => self.files.remove(&id),
            };
            return;
        }
        let policy = self.directories.entry(id).or_default();
        policy.set(name, value);
        if *policy == Policy::default() {
            self.directories.remove(&id);
        }
    }

    pub(super) fn forget(&mut self, id: InodeId) {
        self.directories.remove(&id);
        self.files.remove(&id);
    }
}

/// Whether an attribute is a limit.
pub(crate) fn is_limit(name: &[u8]) -> bool {
    matches!(name, QUOTA | AGE | TTL)
}

impl Retention {
    /// Sets a limit: a decimal number of bytes or seconds, and behind it whether a use begins them anew.
    pub(crate) fn set_limit(
        &self, core: &Core, id: InodeId, name: &[u8], value: &[u8],
    ) -> Result<(), FsError> {
        let limit = parse(name, value).ok_or(FsError::Invalid)?;
        let mut state = core.state_to_change()?;
        let mut inode = state.inode(id)?;
        check_place(&inode, name)?;
        let life = state.metadata.life(id);
        state.metadata.put_attribute(life, id, name, limit.to_string().as_bytes());
        inode.ctime = Time::now();
        state.put_inode(id, &inode);
        self.note_limit(id, inode.is_directory(), name, Some(limit));
        Ok(())
    }

    /// Takes a limit away.
    pub(crate) fn remove_limit(
        &self, core: &Core, id: InodeId, name: &[u8],
    ) -> Result<(), FsError> {
        let mut state = core.state_to_change()?;
        let inode = state.remove_attribute(id, name)?;
        self.note_limit(id, inode.is_directory(), name, None);
        Ok(())
    }

    /// A file or directory gets another owner, who may be able to remove more than the one who has set its
    /// limits: they end, as a set-user-ID bit does. Those that root has set hold for less from then on.
    pub(crate) fn end_limits(
        &self, state: &mut State, (id, inode): (InodeId, &Inode), owner: u32,
    ) -> Result<(), FsError> {
        if [0, owner].contains(&inode.uid) {
            return Ok(());
        }
        for name in [QUOTA, AGE, TTL] {
            match state.remove_attribute(id, name) {
                Ok(_) => self.note_limit(id, inode.is_directory(), name, None),
                Err(FsError::NoAttribute) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Bytes that the last walk found below a directory with a limit.
    pub(crate) fn limited_bytes(&self, id: InodeId) -> Option<u64> {
        self.reports().get(&id).map(|report| report.bytes)
    }

    /// Looks for limits, beside the mount.
    pub fn find_limits(&self, core: &Core) -> Result<(), StoreError> {
        let snapshot = core.state().metadata.snapshot()?;
        let mut found = Vec::new();
        snapshot.for_each_named(b'X', |inode, name| {
            if is_limit(name) {
                found.push((InodeId(inode), name.to_vec()));
            }
        })?;
        drop(snapshot);
        for (id, name) in found {
            let state = core.state();
            let value = state.metadata.attribute(id, &name)?;
            let limit = value.and_then(|value| parse(&name, &value));
            let inode = state.metadata.inode(id)?;
            if let (Some(limit), Some(inode)) = (limit, inode) {
                self.note_limit(id, inode.is_directory(), &name, Some(limit));
            }
        }
        Ok(())
    }

    /// A file has taken over these attributes.
    pub(crate) fn note_limits_of(&self, id: InodeId, attributes: &[Attribute]) {
        if attributes.iter().any(|(name, _)| name == TTL) {
            // That it has one is all that is remembered of a file's.
            self.note_limit(id, false, TTL, Some(Limit { number: 1, is_renewed: false }));
        }
    }

    fn note_limit(&self, id: InodeId, is_directory: bool, name: &[u8], value: Option<Limit>) {
        let mut policies = self.policies();
        policies.note(id, is_directory, name, value);
        let is_active = !policies.directories.is_empty() || !policies.files.is_empty();
        self.is_active.store(is_active, Ordering::Release);
    }
}

/// Whether somebody may set or remove an attribute, where the kernel does not know enough: a limit
/// deletes what others have written, and belongs to the owner of a directory, as a quota does; who may write to a file
/// of somebody else's does not decide where it lies.
pub fn check_limit(core: &Core, id: InodeId, name: &[u8], caller: Caller) -> Result<(), FsError> {
    if [PIN, TIER].contains(&name) && !crate::is_virtual(id) {
        return check_owner(core, id, caller);
    }
    if !is_limit(name) {
        return Ok(());
    }
    // A prefix is in sequences of several owners, and none of them goes alone.
    if crate::is_virtual(id) {
        return Err(FsError::Unsupported);
    }
    check_owner(core, id, caller)
}

/// Whether somebody may read an attribute: how much there is below a directory is not for those
/// who cannot look.
pub(crate) fn check_reader(
    core: &Core, id: InodeId, name: &[u8], caller: Caller,
) -> Result<(), FsError> {
    // What is no directory of the store holds nothing, and belongs to nobody.
    if name == USED_BYTES && !crate::is_virtual(id) {
        check_owner(core, id, caller)
    } else {
        Ok(())
    }
}

fn check_owner(core: &Core, id: InodeId, caller: Caller) -> Result<(), FsError> {
    let owner = core.state().inode(id)?.uid;
    if [0, owner].contains(&caller.uid) { Ok(()) } else { Err(FsError::NotPermitted) }
}

/// A limit as it is stored. Nothing and forever are no limits.
pub(super) fn parse(name: &[u8], value: &[u8]) -> Option<Limit> {
    let text = std::str::from_utf8(value).ok()?;
    let (text, is_renewed) = match text.split_once(' ') {
        Some((number, RENEWED)) if name == TTL => (number, true),
        Some(_) => return None,
        None => (text, false),
    };
    let is_decimal = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = text.parse().ok().filter(|_| is_decimal)?;
    let most = if name == QUOTA { i64::MAX.cast_unsigned() } else { SECONDS_MAX };
    (1..=most).contains(&number).then_some(Limit { number, is_renewed })
}

/// Where a limit means something: not in a layer, of which nothing goes alone, and on files only
/// where they go whole.
fn check_place(inode: &Inode, name: &[u8]) -> Result<(), FsError> {
    let is_allowed = match &inode.kind {
        Kind::Directory { class, .. } => {
            !matches!(class, DirectoryClass::Root | DirectoryClass::Layer(_))
        }
        Kind::File(file) => name == TTL && file.role == Role::Plain,
        _ => false,
    };
    if is_allowed { Ok(()) } else { Err(FsError::Unsupported) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_positive_number() {
        fn check(name: &[u8], value: &str, expected: Option<u64>) {
            let expected = expected.map(|number| Limit { number, is_renewed: false });
            assert_eq!(parse(name, value.as_bytes()), expected, "{value}");
        }
        check(QUOTA, "1", Some(1));
        check(QUOTA, "1099511627776", Some(1 << 40));
        check(QUOTA, "9223372036854775808", None);
        check(QUOTA, "0", None);
        check(QUOTA, "", None);
        check(QUOTA, "+1", None);
        check(QUOTA, "1K", None);
        check(TTL, "3600", Some(3600));
        check(AGE, "99999999999", None);
        check(AGE, "31622400000", Some(SECONDS_MAX));
        check(AGE, "31622400001", None);
        for wrong in ["3600 renew", "3600  renewed", "3600 renewed ", " renewed", "3600renewed"] {
            check(TTL, wrong, None);
        }
        check(AGE, "3600 renewed", None);
        check(QUOTA, "3600 renewed", None);
        let renewed = parse(TTL, b"3600 renewed").unwrap();
        assert_eq!(renewed, Limit { number: 3600, is_renewed: true });
        assert_eq!(renewed.to_string(), "3600 renewed");
    }

    #[test]
    fn a_directory_without_limits_is_forgotten() {
        let (mut policies, id) = (Policies::default(), InodeId(5));
        policies.note(id, true, QUOTA, parse(QUOTA, b"1"));
        policies.note(id, true, TTL, parse(TTL, b"2 renewed"));
        assert_eq!(policies.directories[&id].to_string(), "size=1 ttl=2 ttl_renewed=1");
        policies.note(id, true, QUOTA, None);
        assert_eq!(policies.directories[&id].to_string(), "ttl=2 ttl_renewed=1");
        policies.note(id, true, TTL, None);
        assert!(policies.directories.is_empty());
    }

    #[test]
    fn times_go_on_by_whole_seconds_and_not_beyond_their_end() {
        let time = Time { seconds: 5, nanoseconds: 7 };
        let expected = Time { seconds: 15, nanoseconds: 7 };
        assert_eq!(after(time, Duration::from_millis(10_900)), expected);
        assert_eq!(after(time, Duration::MAX), Time { seconds: i64::MAX, nanoseconds: 7 });
    }
}

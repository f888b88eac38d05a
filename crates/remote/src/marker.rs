//! `KVFS-REMOTE`: says that a place is a remote, of which version, which one it is, and whether and
//! with which keys it is sealed.
//!
//! ```text
//! kvfs remote 1 or 2                       2: sealed
//! id <32 hex>
//! key <id: 16 hex> <check: 64 hex>         of every key that has written there
//! ```
//!
//! A remote is sealed from its beginning or never: a mix would hold in clear what somebody believes
//! to be sealed. Whoever uses it has all of its keys. Without one, objects would look like garbage.

use std::fmt::Write;

use super::error::{RemoteError, Result};
use super::name::{RemoteName, random};
use super::seal::keys::hexadecimal;
use super::seal::{KeyId, KeyRing};
use super::transfer::{Extent, MemorySink, Source};
use super::{BlobStore, Put, PutMode};

/// First words of the marker; the version follows.
const MAGIC: &str = "kvfs remote ";
/// Version of the layout of a remote.
const VERSION: u32 = 1;
/// The same where it is sealed; whoever knows only the other refuses it.
const VERSION_SEALED: u32 = 2;
/// The marker is two short lines, and one for each key.
const MARKER_BYTES_MAX: usize = 4096;

/// Which remote it is; random, made with the remote.
///
/// A store remembers it. The mountpoint of a share that is not mounted looks like an empty
/// directory, and must not be made a new remote, on the local disk, by mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteId(pub u128);

/// What the marker says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Marker {
    id: RemoteId,
    /// Keys with their check values; `None` if the remote is not sealed.
    keys: Option<Vec<(KeyId, String)>>,
}

/// Checks that a place is a remote that this version understands, and the `expected` one if it is
/// known. An empty place becomes a remote if none is expected.
pub fn attach(store: &dyn BlobStore, expected: Option<RemoteId>) -> Result<RemoteId> {
    attach_sealed(store, expected, None)
}

/// Which remote a place is, for who only looks: nothing is put there, and a first key that is new is not made known.
///
/// # Errors
/// [`RemoteError::Foreign`] if it is none, [`RemoteError::Key`] as of [`attach_sealed`].
pub fn identify(store: &dyn BlobStore, ring: Option<&KeyRing>) -> Result<RemoteId> {
    let place = store.place();
    if store.head(RemoteName::Marker)?.is_none() {
        return Err(RemoteError::Foreign(format!(
            "remote {place}: is no remote of kvfs: it has no KVFS-REMOTE"
        )));
    }
    let marker = read(store)?;
    check_keys(place, &marker, ring)?;
    Ok(marker.id)
}

/// [`attach`], of a remote that is sealed with these keys.
///
/// # Errors
/// [`RemoteError::Key`] if the remote is sealed and there is no key or the wrong one, or the other
/// way round.
pub fn attach_sealed(
    store: &dyn BlobStore, expected: Option<RemoteId>, ring: Option<&KeyRing>,
) -> Result<RemoteId> {
    let place = store.place();
    if store.head(RemoteName::Marker)?.is_none() {
        if expected.is_some() {
            return Err(RemoteError::Unreachable(format!(
                "remote {place}: the place is not the remote that this store uses: is it mounted?"
            )));
        }
        if !store.is_vacant()? {
            return Err(RemoteError::Foreign(format!(
                "remote {place}: has files but no KVFS-REMOTE: not a remote, left alone"
            )));
        }
        let id = RemoteId(random().map_err(RemoteError::local)?);
        let keys = ring.map(|ring| first_key(ring, id).into_iter().collect());
        let text = Marker { id, keys }.text();
        // Whether we or another machine put it is the same: what is there now counts.
        store.put(RemoteName::Marker, Source::of(text), PutMode::IfAbsent)?;
    }
    let mut marker = read(store)?;
    if expected.is_some_and(|expected| expected != marker.id) {
        return Err(RemoteError::Foreign(format!(
            "remote {place}: is another remote than this store uses"
        )));
    }
    check_keys(place, &marker, ring)?;
    check_exclusive(store, &marker)?;
    list_key(store, &mut marker, ring)?;
    Ok(marker.id)
}

/// Which remote a place is that has a marker, where that lists the key that writes here: another machine may have listed
/// its own at the same time, in the place of this one.
pub(super) fn check_id(store: &dyn BlobStore, ring: Option<&KeyRing>) -> Result<RemoteId> {
    let mut marker = read(store)?;
    list_key(store, &mut marker, ring)?;
    Ok(marker.id)
}

/// From now on, whoever lacks the key that writes must not take what it wrote for garbage.
fn list_key(store: &dyn BlobStore, marker: &mut Marker, ring: Option<&KeyRing>) -> Result<()> {
    if let (Some(keys), Some(ring)) = (&mut marker.keys, ring)
        && let Some(first) = first_key(ring, marker.id)
        && !keys.contains(&first)
    {
        keys.push(first);
        store.put(RemoteName::Marker, Source::of(marker.text()), PutMode::Replace)?;
    }
    Ok(())
}

/// The key that writes, as the marker has it.
fn first_key(ring: &KeyRing, remote: RemoteId) -> Option<(KeyId, String)> {
    let id = ring.ids().next()?;
    Some((id, hexadecimal(&ring.check(id, remote)?)))
}

fn check_keys(place: &str, marker: &Marker, ring: Option<&KeyRing>) -> Result<()> {
    let (keys, ring) = match (&marker.keys, ring) {
        (None, None) => return Ok(()),
        (Some(_), None) => {
            return Err(RemoteError::Key(format!(
                "remote {place}: is sealed: give the file with its key (--remote-key FILE)"
            )));
        }
        (None, Some(_)) => {
            return Err(RemoteError::Key(format!(
                "remote {place}: is not sealed, and a remote never becomes so: mount without \
                 --remote-key, or name an empty place (--remote)"
            )));
        }
        (Some(keys), Some(ring)) => (keys, ring),
    };
    for (id, check) in keys {
        match ring.check(*id, marker.id) {
            Some(expected) if hexadecimal(&expected) == *check => {}
            Some(_) => {
                return Err(RemoteError::Key(format!(
                    "remote {place}: somebody has changed what KVFS-REMOTE says of key {id}"
                )));
            }
            None => {
                return Err(RemoteError::Key(format!(
                    "remote {place}: is sealed with key {id}, which the key file does not hold: \
                     give the right file, or add the key (--remote-key FILE)"
                )));
            }
        }
    }
    Ok(())
}

/// Some object stores ignore the condition of a put; stores that share such a place would
/// overwrite each other's manifests.
fn check_exclusive(store: &dyn BlobStore, marker: &Marker) -> Result<()> {
    match store.put(RemoteName::Marker, Source::of(marker.text()), PutMode::IfAbsent) {
        // Where nothing can be put, nothing can be overwritten.
        Ok(Put::AlreadyThere) | Err(RemoteError::Denied(_)) => Ok(()),
        Err(error) => Err(error),
        Ok(Put::Stored) => Err(RemoteError::Other(format!(
            "remote {}: does not honour put-if-absent (If-None-Match): use another object store",
            store.place()
        ))),
    }
}

impl Marker {
    fn text(&self) -> Vec<u8> {
        let version = if self.keys.is_some() { VERSION_SEALED } else { VERSION };
        let mut text = format!("{MAGIC}{version}\nid {:032x}\n", self.id.0);
        for (id, check) in self.keys.iter().flatten() {
            let _ = writeln!(text, "key {id} {check}");
        }
        text.into_bytes()
    }

    /// None if it is none.
    fn parse(is_sealed: bool, mut lines: std::str::Lines<'_>) -> Option<Marker> {
        let id = lines.next()?.strip_prefix("id ")?;
        let id = RemoteId(u128::from_str_radix(id, 16).ok()?);
        if !is_sealed {
            return Some(Marker { id, keys: None });
        }
        let key = |line: &str| {
            let (id, check) = line.strip_prefix("key ")?.split_once(' ')?;
            Some((KeyId(u64::from_str_radix(id, 16).ok()?), check.to_owned()))
        };
        let keys: Vec<_> = lines.map(key).collect::<Option<_>>()?;
        (!keys.is_empty()).then_some(Marker { id, keys: Some(keys) })
    }
}

fn read(store: &dyn BlobStore) -> Result<Marker> {
    let place = store.place();
    let foreign =
        || RemoteError::Foreign(format!("remote {place}: its KVFS-REMOTE is not that of a remote"));
    let sink = MemorySink::new(MARKER_BYTES_MAX);
    match store.get(RemoteName::Marker, Extent::Whole { bytes: None }, sink.clone()) {
        Err(RemoteError::Local(_)) => return Err(foreign()),
        other => other?,
    };
    let text = String::from_utf8(sink.take()).map_err(|_| foreign())?;
    let mut lines = text.lines();
    let version = lines.next().and_then(|line| line.strip_prefix(MAGIC)).ok_or_else(foreign)?;
    let is_sealed = version == VERSION_SEALED.to_string();
    if !is_sealed && version != VERSION.to_string() {
        return Err(RemoteError::Foreign(format!(
            "remote {place}: has layout {version}, this kvfs knows {VERSION} and \
             {VERSION_SEALED}: use the kvfs that made it"
        )));
    }
    Marker::parse(is_sealed, lines).ok_or_else(foreign)
}

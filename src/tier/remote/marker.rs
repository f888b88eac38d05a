//! `KVFS-REMOTE`: says that a place is a remote, of which version, and which one it is.

use super::error::{RemoteError, Result};
use super::name::{RemoteName, random};
use super::transfer::{Extent, MemorySink, Source};
use super::{BlobStore, Put, PutMode};

/// First words of the marker; the version follows.
const MAGIC: &str = "kvfs remote ";
/// Version of the layout of a remote.
const VERSION: u32 = 1;
/// The marker is two short lines.
const MARKER_BYTES_MAX: usize = 256;

/// Which remote it is; random, made with the remote.
///
/// A store remembers it. The mountpoint of a share that is not mounted looks like an empty
/// directory, and must not be made a new remote, on the local disk, by mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteId(pub u128);

/// Checks that a place is a remote that this version understands, and the `expected` one if it is
/// known. An empty place becomes a remote if none is expected.
pub fn attach(store: &dyn BlobStore, expected: Option<RemoteId>) -> Result<RemoteId> {
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
        let id = random().map_err(RemoteError::local)?;
        // Whether we or another machine put it is the same: what is there now counts.
        store.put(RemoteName::Marker, Source::of(text(RemoteId(id))), PutMode::IfAbsent)?;
    }
    let id = read(store)?;
    if expected.is_some_and(|expected| expected != id) {
        return Err(RemoteError::Foreign(format!(
            "remote {place}: is another remote than this store uses"
        )));
    }
    check_exclusive(store, id)?;
    Ok(id)
}

/// Some object stores ignore the condition of a put; stores that share such a place would
/// overwrite each other's manifests.
fn check_exclusive(store: &dyn BlobStore, id: RemoteId) -> Result<()> {
    match store.put(RemoteName::Marker, Source::of(text(id)), PutMode::IfAbsent) {
        // Where nothing can be put, nothing can be overwritten.
        Ok(Put::AlreadyThere) | Err(RemoteError::Denied(_)) => Ok(()),
        Err(error) => Err(error),
        Ok(Put::Stored) => Err(RemoteError::Other(format!(
            "remote {}: does not honour put-if-absent (If-None-Match): use another object store",
            store.place()
        ))),
    }
}

fn text(id: RemoteId) -> Vec<u8> {
    format!("{MAGIC}{VERSION}\nid {:032x}\n", id.0).into_bytes()
}

fn read(store: &dyn BlobStore) -> Result<RemoteId> {
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
    if version != VERSION.to_string() {
        return Err(RemoteError::Foreign(format!(
            "remote {place}: has layout {version}, this kvfs knows {VERSION}: use the kvfs that \
             made it"
        )));
    }
    let id = lines.next().and_then(|line| line.strip_prefix("id ")).ok_or_else(foreign)?;
    u128::from_str_radix(id, 16).map(RemoteId).map_err(|_| foreign())
}

//! Events, in slots that are used again.

use std::collections::BTreeMap;

use super::{Life, Metadata};
use crate::store::event::{Event, EventHeads};
use crate::store::{StoreError, keys};

/// What there is of events.
pub(crate) fn heads(metadata: &Metadata) -> Result<EventHeads, StoreError> {
    Ok(metadata.get(&keys::event_heads())?.unwrap_or_default())
}

/// Puts encoded events by their keys into the next commit, and what there is of them then.
pub(crate) fn put(metadata: &mut Metadata, heads: &EventHeads, events: BTreeMap<Vec<u8>, Vec<u8>>) {
    for (key, event) in events {
        metadata.layer(Life::Durable).put(key, event);
    }
    metadata.put(Life::Durable, keys::event_heads(), heads);
}

/// The event with a key, if it can be read.
pub(crate) fn read(metadata: &Metadata, key: &[u8]) -> Result<Option<Event>, StoreError> {
    match metadata.get(key) {
        Err(StoreError::Corrupt(_)) => Ok(None),
        outcome => outcome,
    }
}

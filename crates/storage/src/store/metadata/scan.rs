//! Records in the order of their keys, from all layers at once: the newest of each counts.

use std::borrow::Cow;

use serde::de::DeserializeOwned;

use super::Metadata;
use crate::store::database::{decode, guarded};
use crate::store::layer::{Layer, Record, merge};
use crate::store::record::{Entry, InodeId};
use crate::store::{StoreError, keys};

impl Metadata {
    /// Calls `visit(offset, name, entry)` for the names of a directory from `offset` on, until
    /// it returns false.
    pub fn entries(
        &self, parent: InodeId, offset: u64, mut visit: impl FnMut(u64, &[u8], Entry) -> bool,
    ) -> Result<(), StoreError> {
        let mut outcome = Ok(());
        let prefix = keys::entries(parent);
        self.scan(&keys::entries_from(parent, offset), &prefix, |key, value| {
            match (keys::split_entry(key), decode::<Entry>(value)) {
                (Some((offset, name)), Ok(entry)) => visit(offset, name, entry),
                (_, Err(error)) => {
                    outcome = Err(error);
                    false
                }
                (None, _) => true,
            }
        })?;
        outcome
    }

    /// Visits every record of one table, newest state.
    pub fn scan_table<T: DeserializeOwned>(
        &self, tag: u8, mut visit: impl FnMut(&[u8], T),
    ) -> Result<(), StoreError> {
        let mut outcome = Ok(());
        let prefix = keys::table(tag);
        self.scan(&prefix, &prefix, |key, value| match decode(value) {
            Ok(value) => {
                visit(key, value);
                true
            }
            Err(error) => {
                outcome = Err(error);
                false
            }
        })?;
        outcome
    }

    /// Whether a table has any record.
    pub(super) fn has_records(&self, tag: u8) -> Result<bool, StoreError> {
        let (prefix, mut found) = (keys::table(tag), false);
        self.scan(&prefix, &prefix, |_, _| {
            found = true;
            false
        })?;
        Ok(found)
    }

    pub(super) fn scan(
        &self, from: &[u8], prefix: &[u8], visit: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), StoreError> {
        let mut failure = None;
        let mut sources: Vec<Box<dyn Iterator<Item = Record<'_>> + '_>> = Vec::with_capacity(4);
        let layers = [Some(&self.volatile), Some(&self.active), self.committing.as_deref()];
        for layer in layers.into_iter().flatten() {
            let range = layer.range(from, prefix);
            sources.push(Box::new(range.map(|(k, v)| (Cow::Borrowed(k), v.map(Cow::Borrowed)))));
        }
        let mut base = guarded(|| Ok(self.base.range(from..)?))?;
        let mut next = move || -> Result<Option<Record<'_>>, StoreError> {
            let Some(record) = base.next() else {
                return Ok(None);
            };
            let (key, value) = record?;
            let (key, value) = (key.value().to_vec(), value.value().to_vec());
            Ok(Some((Cow::Owned(key), Some(Cow::Owned(value)))))
        };
        let failed = &mut failure;
        let records = std::iter::from_fn(move || {
            guarded(&mut next).unwrap_or_else(|error| {
                *failed = Some(error);
                None
            })
        });
        sources.push(Box::new(records.take_while(|(key, _)| key.starts_with(prefix))));
        merge(&mut sources, visit);
        drop(sources);
        failure.map_or(Ok(()), Err)
    }
}

/// Whether some layer has a record, also where a newer one removes it: until that is durable, a crash may bring
/// it back.
pub(in crate::store) fn has_any_record(
    metadata: &Metadata, key: &[u8],
) -> Result<bool, StoreError> {
    let Metadata { volatile, active, committing, base, .. } = metadata;
    let layers = [Some(volatile), Some(active), committing.as_deref()];
    let is_put = |layer: &Layer| layer.records.get(key).is_some_and(Option::is_some);
    if layers.into_iter().flatten().any(is_put) {
        return Ok(true);
    }
    guarded(|| Ok(base.get(key)?.is_some()))
}

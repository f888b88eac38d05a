//! Uncommitted metadata: ordered changes that shadow what lies below them.
//!
//! A [`Layer`] is to `meta.redb` what a memtable is to a log-structured tree: reads look into the
//! newest layer first, a commit freezes one and writes it out whole.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::record::ObjectId;

/// Changes since some moment. `None` means "removed".
#[derive(Clone, Debug, Default)]
pub struct Layer {
    /// The changed records.
    pub records: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    /// Objects whose bytes must be durable before the records are.
    pub publish: BTreeSet<ObjectId>,
    /// Objects whose files go once the records are durable.
    pub removals: BTreeSet<ObjectId>,
    /// Nothing names some objects any more that no commit has seen: their files need not wait for one.
    pub(crate) has_let_go: bool,
    /// Bytes of what was put, what was replaced since included.
    pub(crate) bytes: usize,
}

impl Layer {
    /// Nothing to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty() && self.publish.is_empty() && self.removals.is_empty()
    }

    /// Changes that a crash loses unless they are written; a file that it leaves behind is found and removed.
    pub(crate) fn changes(&self) -> usize {
        self.records.len() + self.publish.len()
    }

    /// Whether it leaves more room than there was, on the disk or in the database, once it is written.
    pub fn makes_room(&self) -> bool {
        let gone = self.records.values().filter(|record| record.is_none()).count();
        self.has_let_go || !self.removals.is_empty() || 2 * gone > self.records.len()
    }

    /// Changes a record.
    pub(crate) fn put(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.bytes += key.len() + value.len();
        self.records.insert(key, Some(value));
    }

    /// The changed records whose keys start with `prefix` and are not below `from`.
    pub fn range<'layer>(
        &'layer self, from: &[u8], prefix: &'layer [u8],
    ) -> impl Iterator<Item = (&'layer [u8], Option<&'layer [u8]>)> + use<'layer> {
        self.records
            .range::<[u8], _>((Bound::Included(from), Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
            .map(|(key, value)| (key.as_slice(), value.as_deref()))
    }

    /// Puts older changes below these: what is here stays.
    pub(crate) fn absorb_older(&mut self, older: Layer) {
        for (key, value) in older.records {
            self.records.entry(key).or_insert(value);
        }
        self.publish.extend(older.publish);
        self.removals.extend(older.removals);
        self.has_let_go |= older.has_let_go;
        self.bytes += older.bytes;
    }
}

/// Merges sources that are each in key order; where several hold a key, the first source wins.
/// Calls `visit` with every live record until it returns false.
pub(crate) fn merge<'a>(
    sources: &mut [Box<dyn Iterator<Item = Record<'a>> + 'a>],
    mut visit: impl FnMut(&[u8], &[u8]) -> bool,
) {
    let mut heads: Vec<Option<Record<'a>>> = sources.iter_mut().map(Iterator::next).collect();
    loop {
        let Some(key) = heads.iter().flatten().map(|head| &head.0).min().cloned() else {
            return;
        };
        let mut winner = None;
        for (head, source) in heads.iter_mut().zip(sources.iter_mut()) {
            if head.as_ref().is_some_and(|record| record.0 == key) {
                let record = std::mem::replace(head, source.next());
                winner = winner.or(record);
            }
        }
        if let Some((_, Some(value))) = winner
            && !visit(&key, &value)
        {
            return;
        }
    }
}

/// A key and its value, or that it was removed.
pub(crate) type Record<'a> = (std::borrow::Cow<'a, [u8]>, Option<std::borrow::Cow<'a, [u8]>>);

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;

    fn layer(records: &[(&str, Option<&str>)]) -> Layer {
        let bytes = |text: &str| text.as_bytes().to_vec();
        Layer {
            records: records.iter().map(|(key, value)| (bytes(key), value.map(bytes))).collect(),
            ..Layer::default()
        }
    }

    #[test]
    fn what_takes_more_away_than_it_adds_makes_room() {
        let (added, gone) = (("a", Some("1")), [("b", None), ("c", None)]);
        assert!(!layer(&[]).makes_room() && !layer(&[added]).makes_room());
        assert!(!layer(&[added, gone[0]]).makes_room(), "as much comes as goes");
        assert!(layer(&[added, gone[0], gone[1]]).makes_room());
        assert!(layer(&gone).makes_room());
        let with_a_file =
            Layer { removals: [ObjectId(7)].into_iter().collect(), ..layer(&[added]) };
        assert!(with_a_file.makes_room());
        assert!(Layer { has_let_go: true, ..layer(&[added]) }.makes_room());
    }

    fn merged(layers: &[Layer]) -> String {
        let mut sources: Vec<Box<dyn Iterator<Item = Record<'_>>>> = Vec::new();
        for layer in layers {
            let range = layer.range(b"", b"");
            sources.push(Box::new(range.map(|(k, v)| (Cow::Borrowed(k), v.map(Cow::Borrowed)))));
        }
        let mut text = String::new();
        merge(&mut sources, |key, value| {
            text += &String::from_utf8_lossy(&[key, b"=", value, b" "].concat());
            true
        });
        text
    }

    #[test]
    fn the_newest_layer_wins_and_a_removal_hides_what_lies_below() {
        let new = layer(&[("a", Some("new")), ("b", None)]);
        let old = layer(&[("a", Some("old")), ("b", Some("old")), ("c", Some("old"))]);
        assert_eq!(merged(&[new.clone(), old.clone()]), "a=new c=old ");
        let mut folded = new;
        folded.absorb_older(old);
        assert_eq!(merged(&[folded]), "a=new c=old ");
    }

    #[test]
    fn what_is_absorbed_counts_as_well() {
        let (mut new, mut old) = (Layer::default(), Layer::default());
        assert!(new.is_empty());
        new.put(b"key".to_vec(), b"value".to_vec());
        old.put(b"other".to_vec(), b"value".to_vec());
        old.publish.insert(ObjectId(1));
        old.removals.insert(ObjectId(2));
        old.has_let_go = true;
        new.absorb_older(old);
        assert!(new.bytes == 18 && new.has_let_go);
        assert!(new.publish.contains(&ObjectId(1)) && new.removals.contains(&ObjectId(2)));
        for empty_but in [
            Layer { publish: [ObjectId(1)].into(), ..Layer::default() },
            Layer { removals: [ObjectId(1)].into(), ..Layer::default() },
            layer(&[("a", None)]),
        ] {
            assert!(!empty_but.is_empty());
        }
    }
}

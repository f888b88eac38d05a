//! What the cache was asked for and what of it was there, by model and by directory of `files/`: who looks at a mount
//! sees which of them it works for, and how much computing that saves.
//!
//! | file | |
//! |---|---|
//! | `area` | the model, or the directory right below `files/`, that something lies in |
//! | `told` | lines of `.kvfs/status`, and the sums in metrics |
//! | `rate` | `user.kvfs.prefill_rate`: how fast a model's engine computes what is not here |
//!
//! The kernel keeps names and open files, so what it answers by itself is in no number. A token of a prompt is counted
//! once, though each layer has a page with it: pages of one layer, the model's first that has all tokens, stand for those
//! of the others.

mod area;
pub(crate) mod rate;
mod told;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) use area::{Area, Areas};
pub(crate) use told::{add_lines, saved_seconds};

use crate::core::Core;
use kvfs_page::{Layer, LayerKind, Manifest, Needed, names};
use kvfs_storage::ingest::model::Model;
use kvfs_storage::store::record::{InodeId, PageRecord};

/// Models that are counted apart, and directories as many: some 120 bytes each. For a further one the one that was used
/// least becomes one of the others.
const COUNTED_MAX: usize = 256;

/// What was asked of one model or directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Use {
    /// Prompts that were asked through `prefixes/match`.
    questions: u64,
    asked_tokens: u64,
    answered_tokens: u64,
    /// Names of files, or hashes of prefixes, that were looked up.
    names: u64,
    names_found: u64,
    opens: u64,
    opened_bytes: u64,
    /// Of opened pages of the layer that stands for all.
    restored_tokens: u64,
    /// How long opens of pages took.
    opening: Duration,
    /// The layer that stands for all, once a page was opened.
    layer: Option<Layer>,
}

impl Use {
    fn add(&mut self, other: &Use) {
        self.questions += other.questions;
        self.asked_tokens += other.asked_tokens;
        self.answered_tokens += other.answered_tokens;
        self.names += other.names;
        self.names_found += other.names_found;
        self.opens += other.opens;
        self.opened_bytes += other.opened_bytes;
        self.restored_tokens += other.restored_tokens;
        self.opening += other.opening;
    }

    /// Those with more are told first.
    fn times(&self) -> u64 {
        self.questions + self.names + self.opens
    }
}

/// An open of a page, as far as it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageOpen {
    pub(crate) layer: Layer,
    pub(crate) tokens: u32,
    /// How long it took.
    pub(crate) took: Duration,
}

impl PageOpen {
    /// `None` of a state, which has no tokens.
    pub(crate) fn of(page: &PageRecord, took: Duration) -> Option<PageOpen> {
        let open = PageOpen { layer: Layer(page.layer), tokens: page.tokens, took };
        (!page.is_state()).then_some(open)
    }
}

/// All uses since the mount began.
#[derive(Debug, Default)]
pub(crate) struct Hits {
    tally: Mutex<Tally>,
    pub(crate) areas: Areas,
}

#[derive(Clone, Debug, Default)]
struct Tally {
    models: Table,
    directories: Table,
}

/// Uses of models, or of directories.
#[derive(Clone, Debug, Default)]
struct Table {
    known: BTreeMap<InodeId, Use>,
    others: Use,
}

impl Tally {
    /// Where something that lies there is counted.
    fn of(&mut self, area: Area) -> &mut Use {
        match area {
            Area::Model(id) => self.models.of(id),
            Area::Directory(id) => self.directories.of(id),
            Area::Elsewhere => &mut self.directories.others,
        }
    }
}

impl Table {
    fn of(&mut self, id: InodeId) -> &mut Use {
        if self.known.len() >= COUNTED_MAX && !self.known.contains_key(&id) {
            let least = self.known.iter().min_by_key(|(_, counted)| counted.times());
            if let Some(gone) = least.map(|(id, _)| *id).and_then(|id| self.known.remove(&id)) {
                self.others.add(&gone);
            }
        }
        self.known.entry(id).or_default()
    }
}

impl Hits {
    /// A question about a prompt was answered.
    pub(crate) fn note_question(&self, model: InodeId, asked_tokens: u64, answered_tokens: u64) {
        let question = Use { questions: 1, asked_tokens, answered_tokens, ..Use::default() };
        self.tally().of(Area::Model(model)).add(&question);
    }

    /// Names were looked up in a directory, of which so many are there and absent. Of a model only hashes count.
    pub(crate) fn note_names(&self, area: Area, names: [u64; 2]) {
        if !matches!(area, Area::Model(_)) {
            self.note_looks(area, names);
        }
    }

    /// A hash was looked up in a model's `prefixes/`.
    pub(crate) fn note_prefix(&self, model: InodeId, is_there: bool) {
        self.note_looks(Area::Model(model), [u64::from(is_there), u64::from(!is_there)]);
    }

    fn note_looks(&self, area: Area, [here, absent]: [u64; 2]) {
        let names = Use { names: here + absent, names_found: here, ..Use::default() };
        self.tally().of(area).add(&names);
    }

    /// A file that is no page was opened to be read.
    pub(crate) fn note_open(&self, area: Area, opened_bytes: u64) {
        self.tally().of(area).add(&Use { opens: 1, opened_bytes, ..Use::default() });
    }

    /// A page was opened. Returns the tokens of it that no other layer's page has counted.
    pub(crate) fn note_page(
        &self, core: &Core, area: Area, opened_bytes: u64, page: PageOpen,
    ) -> u64 {
        let known = self.tally().of(area).layer;
        // Without this lock: it may have to read the model's manifest, once.
        let layer = known.or_else(|| layer_of(core, area));
        let tokens = if layer == Some(page.layer) { u64::from(page.tokens) } else { 0 };
        let mut tally = self.tally();
        let counted = tally.of(area);
        counted.layer = layer;
        counted.add(&Use {
            opens: 1,
            opened_bytes,
            restored_tokens: tokens,
            opening: page.took,
            ..Use::default()
        });
        tokens
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The layer that stands for all of a model.
fn layer_of(core: &Core, area: Area) -> Option<Layer> {
    let Area::Model(model) = area else { return None };
    let object = {
        let state = core.state();
        if let Some(rules) = state.models.get(&model) {
            return layer_for_all(&rules.manifest);
        }
        let manifest = state.entry(model, names::MANIFEST.as_bytes()).ok()??;
        state.inode(manifest.inode).ok()?.file()?.object?
    };
    // The disk may not answer, and others want the state meanwhile.
    let rules = Model::load(&core.store, object).ok()?;
    layer_for_all(&rules.manifest)
}

/// The first that needs the rows of all tokens, or else has rows of some.
pub(crate) fn layer_for_all(manifest: &Manifest) -> Option<Layer> {
    let find = |is_it: fn(&LayerKind) -> bool| {
        let mut layers = (0..manifest.geometry().num_layers()).map(Layer);
        layers.find(|layer| manifest.layer_kind(*layer).as_ref().is_some_and(is_it))
    };
    find(|kind| kind.needed() == Needed::All).or_else(|| find(LayerKind::has_rows_of_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::Unmounted;

    #[test]
    fn tokens_are_counted_once_though_each_layer_has_them() {
        let unmounted = Unmounted::new();
        let model = unmounted.make_model(2);
        let area = Area::Model(model.directory);
        let hits = Hits::default();
        let took = Duration::from_millis(2);
        let noted = [0, 1].map(|layer| {
            let page = PageOpen { layer: Layer(layer), tokens: 64, took };
            hits.note_page(&unmounted.fs.core, area, 100, page)
        });
        assert_eq!(noted, [64, 0]);
        let counted = *hits.tally().of(area);
        assert_eq!((counted.opens, counted.opened_bytes, counted.restored_tokens), (2, 200, 64));
        assert_eq!(counted.opening, 2 * took);
    }

    #[test]
    fn those_that_are_used_are_counted_apart_and_nothing_is_lost() {
        let hits = Hits::default();
        let used = InodeId(7);
        hits.note_names(Area::Directory(used), [50, 0]);
        hits.note_question(used, 3, 2);
        let cold = COUNTED_MAX as u64 * 3;
        for number in 0..cold {
            hits.note_names(Area::Directory(InodeId(1000 + number)), [0, 1]);
        }
        let late = InodeId(5);
        hits.note_names(Area::Directory(late), [5, 0]);
        hits.note_names(Area::Elsewhere, [0, 1]);
        let Tally { models, directories } = hits.tally().clone();
        assert_eq!((models.known.len(), directories.known.len()), (1, COUNTED_MAX));
        assert_eq!([used, late].map(|id| directories.known[&id].names), [50, 5]);
        let all = directories.known.values().map(|counted| counted.names).sum::<u64>();
        assert_eq!(all + directories.others.names, 50 + cold + 5 + 1);
        assert_eq!(models.known[&used].answered_tokens, 2);
    }
}

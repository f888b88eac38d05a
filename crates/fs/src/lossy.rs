//! Pages that go cold with fewer bits, for models whose manifest asks for it.
//!
//! A `cold_encoding` of `q8_0` or `q4_0` allows it; every directory with the same cache identity must
//! say the same. The page becomes a *new version*, as if it had been written anew: its values are what
//! the blocks stand for, its checksums and its time are new, and `user.kvfs.lossy` says so. It takes
//! the place of the old one in the inode, so all names of a page change at once, and only while nobody
//! has it open or mapped: whoever reads keeps the bytes that they opened.
//!
//! ```text
//! quantise   staging/NEW.z is durable, was read back and compared
//! record     EncodedCopy of NEW; objects/ab/NEW.z, its directory synced
//! swap       the inode's object is NEW: one change, so it is in one commit
//! drop       that commit is durable: the old object's files go
//! ```
//!
//! Until the swap is durable the old object is complete, from then on the new one.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::Arc;

use super::FsError;
use super::demotion::Demotion;
use super::encoded::NOT_ENCODED;
use super::extended::LOSSY;
use super::residency::item;
use super::retention::recorded_use;
use super::share::on_each;
use crate::core::failures::note_failure;
use crate::core::idle::{is_idle, lets_go};
use crate::core::state::State;
use crate::core::{happened, uses};
use kvfs_page::{Dtype, PageHasher, PageIdentity};
use kvfs_storage::ingest::model::Model;
use kvfs_storage::store::Store;
use kvfs_storage::store::disk::{Access, DiskDirectory, DiskPath, read_all, shard};
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::metadata::Life;
use kvfs_storage::store::record::{
    DirectoryClass, EncodedCopy, Entry, Inode, InodeId, ObjectId, ObjectKind, ObjectRecord,
    PageRecord, Role, Time,
};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::encoded::pack_blob;
use kvfs_storage::tier::encoding::{
    ColdEncoding, Quantisation, Quantised, Subject, Version, quantise_page,
};
use kvfs_storage::tier::exchange::Item;

/// Larger pages keep their values: quantising takes three times a page of memory, in two threads.
const LOSSY_BYTES_MAX: u64 = 64 << 20;

/// The models that allow it, by their identity.
#[derive(Debug, Default)]
pub(super) struct LossyModels {
    /// [`names_changed`](kvfs_storage::store::metadata::Metadata::names_changed) when they were looked at.
    as_of: u64,
    allowed: HashMap<[u8; 16], Allowed>,
}

type Allowed = (Arc<Model>, Quantisation);

/// A page that is to be quantised.
#[derive(Clone, Debug)]
struct Candidate {
    id: InodeId,
    /// As it was looked at: every change of names or bytes changes it.
    inode: Inode,
    page: PageRecord,
    item: Item,
    model: Arc<Model>,
    quantisation: Quantisation,
}

/// What became of one.
enum Outcome {
    /// A new version is durable in `staging/`.
    Made { item: Item, page: PageRecord, copy: EncodedCopy },
    /// Its values were rounded before: the copy is of the object that it has.
    Same(EncodedCopy),
    /// It keeps its values.
    Unsuitable,
}

impl Demotion<'_> {
    /// Makes new versions of those of these pages whose model allows it, durably; how many. Those that
    /// are to be encoded without loss are returned.
    pub(super) fn make_lossy(
        &self, models: &mut LossyModels, objects: &[(ObjectId, InodeId)],
    ) -> Result<(usize, Vec<(ObjectId, InodeId)>), FsError> {
        self.look_at_models(models)?;
        if models.allowed.is_empty() {
            return Ok((0, objects.to_vec()));
        }
        let (mut candidates, mut others) = (Vec::new(), Vec::new());
        for &(object, id) in objects {
            let Some(candidate) = candidate(&self.core.state(), models, id, object)? else {
                others.push((object, id));
                continue;
            };
            if lets_go(self.core, id) && is_idle(self.core, &self.core.state(), id, object) {
                candidates.push(candidate);
            } else {
                // Its turn comes when nobody uses it.
                self.tiers.counters.skipped(Tier::Ssd, "in_use");
            }
        }
        let has_other_names = self.with_names_elsewhere(&candidates)?;
        let (elsewhere, candidates): (Vec<_>, Vec<_>) =
            candidates.into_iter().partition(|page| has_other_names.contains(&page.id));
        others.extend(elsewhere.iter().map(|page| (page.item.object, page.id)));
        let candidates = numbered(&mut self.core.state(), candidates);
        let (mut made, mut shards, mut failure) = (Vec::new(), BTreeSet::new(), None);
        let store = &self.core.store;
        let quantise = |(page, version): &(Candidate, ObjectId)| quantise(store, page, *version);
        for ((page, _), outcome) in on_each(self, &candidates, quantise) {
            match outcome {
                Ok(Outcome::Made { item, page: record, copy }) => {
                    if self.place_version(&item, &copy)? {
                        shards.insert(shard(item.object));
                        made.push((page, item, record, copy));
                    }
                }
                Ok(Outcome::Same(copy)) => {
                    shards.insert(shard(page.item.object));
                    self.note_encoded(&page.item, &copy)?;
                }
                Ok(Outcome::Unsuitable) => others.push((page.item.object, page.id)),
                // Somebody changed or removed the file meanwhile, or memory alone has it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    self.core.observer.failed(&format!("{error}: it was not encoded"));
                    let why = format!("was not encoded: {error}");
                    let file = (page.id, Some(page.item.length));
                    note_failure(self.core, NOT_ENCODED, file, why);
                    self.tiers.copies.forbid_encoding(page.item.object);
                }
                Err(error) => failure = Some(error),
            }
        }
        // Before any record relies on them.
        for directory in shards.iter().copied().map(DiskDirectory::ObjectShard) {
            self.core.store.disk.sync_directory(directory)?;
        }
        let count = self.swap_all(&made)?;
        if !shards.is_empty() {
            self.commits.commit()?;
        }
        failure.map_or(Ok((count, others)), |error| Err(error.into()))
    }

    /// Reads the manifests again if any may have changed.
    fn look_at_models(&self, models: &mut LossyModels) -> Result<(), FsError> {
        let mut state = self.core.state();
        if state.metadata.names_changed == models.as_of {
            return Ok(());
        }
        models.as_of = state.metadata.names_changed;
        let mut directories = Vec::new();
        if let Some(all) = state.entry(InodeId::ROOT, b"models")? {
            state.metadata.entries(all.inode, 0, |_, _, entry| {
                directories.push(entry.inode);
                true
            })?;
        }
        let mut wishes: HashMap<[u8; 16], Option<Allowed>> = HashMap::new();
        for directory in directories {
            // A model without a manifest that can be read has no pages that could be checked.
            let Ok(model) = self.core.model_of(&mut state, directory) else {
                continue;
            };
            let wish = wish(&model).map(|quantisation| (Arc::clone(&model), quantisation));
            let agreed = wishes.entry(model.identity.0).or_insert_with(|| wish.clone());
            let is_same = agreed.as_ref().map(|(_, known)| *known) == wish.map(|(_, new)| new);
            if !is_same {
                *agreed = None;
            }
        }
        let allowed: HashMap<_, _> =
            wishes.into_iter().filter_map(|(model, wish)| Some((model, wish?))).collect();
        let what = |models: &HashMap<[u8; 16], Allowed>| {
            models.iter().map(|(model, (_, wish))| (*model, *wish)).collect::<BTreeSet<_>>()
        };
        if what(&allowed) != what(&models.allowed) {
            self.tiers.copies.reconsider_encoding();
        }
        models.allowed = allowed;
        Ok(())
    }

    /// Pages of which not every name stands in a layer's directory: under an ordinary name a page is
    /// an ordinary file, which nobody rounds.
    fn with_names_elsewhere(&self, candidates: &[Candidate]) -> Result<HashSet<InodeId>, FsError> {
        if candidates.is_empty() {
            return Ok(HashSet::new());
        }
        // Names that change after the candidates were looked at change their inodes.
        self.commits.commit()?;
        let mut parents: HashMap<InodeId, Vec<InodeId>> =
            candidates.iter().map(|page| (page.id, Vec::new())).collect();
        let snapshot = self.core.state().metadata.snapshot()?;
        snapshot.for_each::<Entry>(b'E', |parent, entry| {
            if let Some(found) = parents.get_mut(&entry.inode) {
                found.push(InodeId(parent));
            }
        })?;
        let state = self.core.state();
        let mut elsewhere = HashSet::new();
        for page in candidates {
            let found = parents.remove(&page.id).unwrap_or_default();
            let in_layers = found.iter().filter(|parent| is_layer(&state, **parent)).count();
            if in_layers != found.len() || in_layers as u64 != u64::from(page.inode.links) {
                elsewhere.insert(page.id);
            }
        }
        Ok(elsewhere)
    }

    /// Gives the encoded copy of a new version its place and its record; no file has it yet. False
    /// if the mount ends.
    fn place_version(&self, item: &Item, copy: &EncodedCopy) -> Result<bool, FsError> {
        let object = item.object;
        let (from, to) = (DiskPath::Encoding(object), DiskPath::Encoded(object));
        let mut state = self.core.state_to_change()?;
        if self.tiers.is_closing() {
            self.core.store.disk.remove(&from)?;
            return Ok(false);
        }
        // The record first: the sweep takes a file without one for garbage.
        state.metadata.put_encoded_copy(object, copy);
        if let Err(error) = self.core.store.disk.rename(&from, &to) {
            state.metadata.forget_encoded_copy(object)?;
            return Err(error.into());
        }
        Ok(true)
    }

    fn swap_all(
        &self, made: &[(&Candidate, Item, PageRecord, EncodedCopy)],
    ) -> Result<usize, FsError> {
        let mut count = 0;
        for (candidate, item, page, copy) in made {
            if self.swap(candidate, (item, *page, copy))? {
                count += 1;
            } else {
                self.core.state().metadata.forget_encoded_copy(item.object)?;
                self.tiers.copies.discard_encoded(item.object);
            }
        }
        Ok(count)
    }

    /// The new version is the page from now on, unless somebody uses the old one or changed the file.
    fn swap(
        &self, candidate: &Candidate, (item, page, copy): (&Item, PageRecord, &EncodedCopy),
    ) -> Result<bool, FsError> {
        let (id, old) = (candidate.id, candidate.item.object);
        let let_go = lets_go(self.core, id);
        let mut state = self.core.state_to_change()?;
        let mut inode = match state.metadata.inode(id)? {
            Some(inode) if inode == candidate.inode => inode,
            _ => return Ok(false),
        };
        if self.tiers.is_closing() || state.is_pinned(id)? {
            return Ok(false);
        }
        if !let_go || !is_idle(self.core, &state, id, old) {
            self.tiers.counters.skipped(Tier::Ssd, "in_use");
            return Ok(false);
        }
        let times_used = self.tiers.copies.encoded().uses(old);
        let recorded = recorded_use(&state, id, &inode)?;
        let last_use = Some(recorded).max(uses::held(&self.core.uses).of(id));
        let now = Time::now();
        (inode.mtime, inode.ctime) = (now, now);
        if let Some(file) = inode.file_mut() {
            (file.object, file.role) = (Some(item.object), Role::Page(page));
        }
        let record = ObjectRecord {
            kind: ObjectKind::Page,
            length: item.length,
            checksum: Some(item.checksum.0),
            references: 1,
        };
        state.metadata.put_object(item.object, &record);
        let encoding = copy.encoding.extension();
        state.metadata.put_attribute(Life::Durable, id, LOSSY, encoding.as_bytes());
        state.put_inode(id, &inode);
        state.metadata.watches.tell_of_content(id);
        state.drop_object(old)?;
        state.metadata.forget_page(&candidate.item.checksum.0, id)?;
        if let Some(node) = state.nodes.get_mut(&id) {
            node.verified = None;
        }
        self.tiers.copies.forget(old);
        self.tiers.copies.note_encoded(item.object, item.length, copy, true);
        self.tiers.counters.moved(Tier::Ssd, Tier::Ssd, item.length);
        self.tiers.counters.rounded(encoding);
        drop(state);
        let reason = format!("rounded to {encoding}: the disk needed room");
        // By now the record has the time of the new version.
        let event = Event { used: last_use, uses: times_used, ..Event::new(What::Encoded, reason) };
        happened::note_move(self.core, id, event);
        self.core.invalidate(super::Invalidation::Inode(id));
        Ok(true)
    }
}

/// Makes a new version of a page, which has this number if it has other bytes.
fn quantise(store: &Store, candidate: &Candidate, object: ObjectId) -> io::Result<Outcome> {
    let Candidate { page, item: old, model, quantisation, .. } = candidate;
    let damaged = |what: &str| {
        let what = format!("object {}: {what}", old.object);
        io::Error::new(io::ErrorKind::InvalidData, what)
    };
    let file = store.disk.open(&DiskPath::Object(old.object), Access::Read)?;
    let bytes = read_all(file.as_ref(), LOSSY_BYTES_MAX)?;
    drop(file);
    let mut hasher = PageHasher::new();
    hasher.update(&bytes);
    if hasher.finish(&PageIdentity::from(page)).object != old.checksum {
        return Err(damaged("the bytes are not those on record"));
    }
    let quantised = model
        .place(page.layer, page.start)
        .and_then(|place| quantise_page(&bytes, &place, *quantisation));
    let version = match quantised.map_err(|error| damaged(&error.to_string()))? {
        Quantised::Unsuitable(_) => return Ok(Outcome::Unsuitable),
        Quantised::Version(version) => version,
    };
    let Version { is_changed, digest, blob, .. } = version;
    drop(bytes);
    if !is_changed {
        let copy = pack_blob(store, old, quantisation.encoding(), &blob)?;
        return Ok(Outcome::Same(copy));
    }
    let page = PageRecord { checksum: digest.page.0, ..*page };
    let subject = Subject::Page(PageIdentity::from(&page));
    let item = Item { object, checksum: digest.object, subject, ..*old };
    let copy = pack_blob(store, &item, quantisation.encoding(), &blob)?;
    Ok(Outcome::Made { item, page, copy })
}

/// Pages, and the numbers of their new versions. Whoever makes those has little of the processor, and takes no lock.
fn numbered(state: &mut State, candidates: Vec<Candidate>) -> Vec<(Candidate, ObjectId)> {
    let number = |candidate| {
        let object = state.metadata.new_object();
        // It never has a file of its own in `staging/`.
        state.metadata.staged.remove(&object);
        (candidate, object)
    };
    candidates.into_iter().map(number).collect()
}

/// What a model's manifest asks for.
fn wish(model: &Model) -> Option<Quantisation> {
    match model.manifest.fields().cold_encoding.as_deref()?.parse() {
        Ok(ColdEncoding::Quantised(quantisation)) => Some(quantisation),
        _ => None,
    }
}

fn is_layer(state: &State, directory: InodeId) -> bool {
    let class = state.directory(directory).map(|(_, class)| class);
    matches!(class, Ok(DirectoryClass::Layer(_)))
}

/// A page whose model allows it, whose bytes are durable, and that has no encoded copy yet.
fn candidate(
    state: &State, models: &LossyModels, id: InodeId, object: ObjectId,
) -> Result<Option<Candidate>, FsError> {
    let Some(inode) = state.metadata.inode(id)? else {
        return Ok(None);
    };
    let file = inode.file().filter(|file| file.object == Some(object) && file.is_settled());
    let Some((Role::Page(page), size)) = file.map(|file| (file.role, file.size)) else {
        return Ok(None);
    };
    let Some((model, quantisation)) = models.allowed.get(&page.model) else {
        return Ok(None);
    };
    let is_durable = !state.metadata.publishes(object) && !state.metadata.is_committing(object);
    let is_shared = state.metadata.object(object)?.is_none_or(|record| record.references > 1);
    // A state is no rows that ggml's blocks are made for, and goes on from its exact bytes.
    if page.is_state() {
        return Ok(None);
    }
    let has_16_bits = matches!(page.dtype, Dtype::F16 | Dtype::Bf16);
    let fits = is_durable && !is_shared && has_16_bits && size <= LOSSY_BYTES_MAX;
    if !fits || state.is_pinned(id)? || state.metadata.encoded_copy(object)?.is_some() {
        return Ok(None);
    }
    let item = item(state, Role::Page(page), object)?;
    let (model, quantisation) = (Arc::clone(model), *quantisation);
    Ok(item.map(|item| Candidate { id, inode, page, item, model, quantisation }))
}

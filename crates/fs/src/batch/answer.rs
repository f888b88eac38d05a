//! The answer to a question about many names. It never waits for the remote, decodes nothing and repairs nothing: what
//! would take that is told as such, and whoever wants it opens the file.

use std::time::{Duration, Instant};

use super::names::{Directory, Named};
use crate::attributes::Caller;
use crate::core::guard::StateGuard;
use crate::core::rights::{Grant, User};
use crate::core::stale::let_go_if_stale;
use crate::core::state::State;
use crate::hits::{Area, PageOpen};
use crate::prefixes::Share;
use crate::residency::tier_here;
use crate::seen;
use crate::verify::{Depth, Verify};
use crate::{FileSystem, FsError, Invalidation};
use kvfs_page::batch::{
    ANSWER_HEAD_BYTES, AnswerHead, Ask, CONTENT_BYTES_MAX, FILE_BYTES_MAX, Question, RECORD_BYTES,
    Record, Status,
};
use kvfs_page::{Checksum, PageHasher, PageIdentity, content_checksum};
use kvfs_storage::store::disk::{DiskFile, FileStat};
use kvfs_storage::store::record::{FileRecord, InodeId, ObjectId, Role};

/// How long an answer takes at most, but for one file: others wait for the thread, and a question may name 65,536 files
/// of a slow disk. What is not answered by then is asked again.
const TIME_MAX: Duration = Duration::from_millis(50);
/// Names that are looked up before others get the state: some 0.1 ms.
const AT_ONCE: usize = 64;

/// An answer that is being made.
struct Making<'a> {
    fs: &'a FileSystem,
    user: User,
    question: &'a Question<'a>,
    /// Head, records and contents.
    bytes: Vec<u8>,
    /// Records that are made.
    answered: usize,
    /// What the names count for, once their directory was found.
    area: Area,
    held: &'a mut Share,
}

/// A file whose bytes go into an answer. It counts as having one more reader: nobody replaces its bytes meanwhile.
struct Reading {
    named: Named,
    object: ObjectId,
    checksum: Option<[u8; 16]>,
    verified: Option<(ObjectId, FileStat)>,
    depth: Depth,
}

/// Makes the answer.
pub(super) fn make(
    fs: &FileSystem, caller: Caller, question: &Question<'_>, held: &mut Share,
) -> Result<Vec<u8>, FsError> {
    let records_bytes = ANSWER_HEAD_BYTES + question.names.len() * RECORD_BYTES;
    if !held.grow(records_bytes as u64) {
        return Err(FsError::NoRoom);
    }
    let (bytes, answered) = (vec![0; records_bytes], 0);
    let (user, area) = (User::from(caller), Area::Elsewhere);
    let mut making = Making { fs, user, question, bytes, answered, area, held };
    let deadline = Instant::now() + TIME_MAX;
    match question.ask {
        Ask::Have => making.have(deadline)?,
        Ask::Get => making.get(deadline)?,
    }
    Ok(making.finish())
}

impl Making<'_> {
    /// Where the contents begin.
    fn contents_at(&self) -> usize {
        ANSWER_HEAD_BYTES + self.question.names.len() * RECORD_BYTES
    }

    fn content_bytes(&self) -> u64 {
        (self.bytes.len() - self.contents_at()) as u64
    }

    fn put(&mut self, status: Status, size: u64) {
        let at = ANSWER_HEAD_BYTES + self.answered * RECORD_BYTES;
        self.bytes[at..at + RECORD_BYTES].copy_from_slice(&Record { status, size }.to_bytes());
        self.answered += 1;
    }

    fn have(&mut self, deadline: Instant) -> Result<(), FsError> {
        let question = self.question;
        let mut chunks = question.names.chunks(AT_ONCE);
        // Also of a question without names, whose directory is to be told of.
        let mut names = chunks.next().unwrap_or_default();
        loop {
            let state = self.fs.core.state();
            let directory = Directory::find(&state, self.user, question.directory)?;
            self.area = directory.map_or(Area::Elsewhere, |it| it.area(&self.fs.core, &state));
            for name in names {
                let Record { status, size } = match directory {
                    Some(directory) => self.have_one(&state, directory, name)?,
                    None => Record { status: Status::Other, size: 0 },
                };
                self.put(status, size);
            }
            drop(state);
            names = match chunks.next() {
                Some(next) if Instant::now() < deadline => next,
                _ => return Ok(()),
            };
        }
    }

    fn have_one(
        &self, state: &State, directory: Directory, name: &[u8],
    ) -> Result<Record, FsError> {
        let named = match directory.look_up(state, name)? {
            Ok(named) => named,
            Err(status) => return Ok(Record { status, size: 0 }),
        };
        let shown = state.attributes_of(&self.fs.core.store, named.id, &named.inode);
        // Its bytes are on their way from one place to another: stat waits for that.
        let Ok(shown) = shown else { return Ok(Record { status: Status::Other, size: 0 }) };
        Ok(Record { status: Status::Here, size: shown.size })
    }

    fn get(&mut self, deadline: Instant) -> Result<(), FsError> {
        let question = self.question;
        if question.names.is_empty() {
            Directory::find(&self.fs.core.state(), self.user, question.directory)?;
        }
        for (index, name) in question.names.iter().enumerate() {
            if index > 0 && Instant::now() >= deadline {
                break;
            }
            let Record { status, size } = self.get_one(name)?;
            if status == Status::Again {
                break;
            }
            self.put(status, size);
        }
        if self.answered == 0 && !question.names.is_empty() {
            // Asking again would be of no use before others let go.
            return Err(FsError::NoRoom);
        }
        Ok(())
    }

    fn get_one(&mut self, name: &[u8]) -> Result<Record, FsError> {
        let state = self.fs.core.state();
        let only = |status| Ok(Record { status, size: 0 });
        let Some(directory) = Directory::find(&state, self.user, self.question.directory)? else {
            return only(Status::Other);
        };
        self.area = directory.area(&self.fs.core, &state);
        let named = match directory.look_up(&state, name)? {
            Ok(named) => named,
            Err(status) => return only(status),
        };
        match self.user.may_certainly_read(&named.inode) {
            Grant::Yes => {}
            Grant::No => return only(Status::Denied),
            Grant::Unknown => return only(Status::Other),
        }
        let size = named.file.size;
        if is_changing(&state, &named) {
            return only(Status::Other);
        }
        if size > FILE_BYTES_MAX {
            return Ok(Record { status: Status::Large, size });
        }
        let begun = self.bytes.len();
        if self.content_bytes() + size > CONTENT_BYTES_MAX || !self.held.grow(size) {
            return Ok(Record { status: Status::Again, size });
        }
        let status = self.read(state, named)?;
        if status != Status::Here {
            self.bytes.truncate(begun);
        }
        Ok(Record { status, size })
    }

    /// Adds the bytes of a file to the answer, as an open would have let them be read.
    fn read(&mut self, mut state: StateGuard<'_>, named: Named) -> Result<Status, FsError> {
        let fs = self.fs;
        let Some(object) = state.current_object(named.id, &named.file) else {
            return Ok(Status::Other);
        };
        let checksum = state.metadata.object(object)?.and_then(|record| record.checksum);
        let node = state.nodes.entry(named.id).or_default();
        node.readers += 1;
        let verified = node.verified.filter(|_| fs.choices.verify() != Verify::Always);
        let depth = fs.opening().depth_at_open();
        drop(state);
        let reading = Reading { named, object, checksum, verified, depth };
        let (begun, begun_at) = (self.bytes.len(), Instant::now());
        let outcome = self.take_in(&reading);
        let mut state = fs.core.state();
        let is_same = reading.is_same_in(&state);
        if let Some(node) = state.nodes.get_mut(&reading.named.id) {
            node.readers -= 1;
            if let Ok(Ok(stat)) = &outcome
                && is_same
                && depth == Depth::Bytes
            {
                node.verified = Some((object, *stat));
            }
        }
        if let_go_if_stale(&mut state, reading.named.id)? {
            fs.core.invalidate(Invalidation::Names(reading.named.id));
        }
        state.drop_node_if_idle(reading.named.id)?;
        drop(state);
        match outcome {
            // Somebody wrote to it, or what it was has another name now.
            _ if !is_same => Ok(Status::Other),
            Ok(Ok(_)) => {
                let bytes = (self.bytes.len() - begun) as u64;
                fs.retention.note_use(&fs.core, reading.named.id, libc::O_RDONLY);
                let page = match &reading.named.file.role {
                    Role::Page(page) => PageOpen::of(page, begun_at.elapsed()),
                    _ => None,
                };
                seen::note_open(&fs.core, self.area, (tier_here(&fs.core, object), bytes), page);
                seen::note_use_of_tiers(fs.residency(), object, bytes);
                seen::note_use(&fs.core, object, Some(reading.named.file.role), bytes);
                Ok(Status::Here)
            }
            Ok(Err(status)) => Ok(status),
            // The disk: whoever opens it hears of that.
            Err(_) => Ok(Status::Damaged),
        }
    }

    /// The bytes themselves, compared with their checksum as an open compares them.
    fn take_in(&mut self, reading: &Reading) -> Result<Result<FileStat, Status>, FsError> {
        let Some(opened) = self.fs.residency().open_if_here(reading.object)? else {
            return Ok(Err(Status::Away));
        };
        let stat = opened.stat()?;
        if stat.length != reading.named.file.size {
            return Ok(Err(Status::Damaged));
        }
        let begun = self.bytes.len();
        let length = usize::try_from(stat.length).map_err(|_| FsError::TooLarge)?;
        self.bytes.resize(begun + length, 0);
        let bytes = &mut self.bytes[begun..];
        if !fill(opened.as_ref(), bytes)? {
            return Ok(Err(Status::Damaged));
        }
        let is_known = reading.verified.is_some_and(|(object, known)| {
            object == reading.object && known.is_same_content(&stat)
        });
        if is_known || reading.depth == Depth::Length {
            return Ok(Ok(stat));
        }
        let expected = reading.checksum;
        let is_good = expected.is_none_or(|sum| sum == checksum(&reading.named.file, bytes).0);
        Ok(if is_good { Ok(stat) } else { Err(Status::Damaged) })
    }

    fn finish(mut self) -> Vec<u8> {
        let names = self.question.names.len();
        while self.answered < names {
            self.put(Status::Again, 0);
        }
        let head = AnswerHead {
            id: self.question.id,
            names: u32::try_from(names).unwrap_or(u32::MAX),
            bytes: self.content_bytes(),
        };
        self.bytes[..ANSWER_HEAD_BYTES].copy_from_slice(&head.to_bytes());
        let records = self.bytes[ANSWER_HEAD_BYTES..self.contents_at()].chunks(RECORD_BYTES);
        let statuses = records.filter_map(Record::parse).map(|record| record.status);
        let names = self.fs.core.observer.batched(statuses);
        self.fs.core.hits.note_names(self.area, names);
        self.bytes
    }
}

impl Reading {
    /// Whether the file is what it was before its bytes were read. Names, rights and dates say nothing of them.
    fn is_same_in(&self, state: &State) -> bool {
        let Ok(Some(now)) = state.metadata.inode(self.named.id) else { return false };
        let Some(file) = now.file() else { return false };
        let bytes = |file: &FileRecord| (file.role, file.object, file.size, file.unsettled);
        let checksum = state.metadata.object(self.object).ok().flatten();
        // What was not committed yet may get its checksum meanwhile.
        let is_same_sum =
            self.checksum.is_none() || checksum.and_then(|record| record.checksum) == self.checksum;
        bytes(file) == bytes(&self.named.file) && is_same_sum && !is_written(state, self.named.id)
    }
}

/// Whether somebody writes to a file, or what is written to it only appended.
fn is_changing(state: &State, named: &Named) -> bool {
    let is_stale = state.nodes.get(&named.id).is_some_and(|node| node.stale);
    is_stale
        || named.file.unsettled
        || named.file.role.is_append_only()
        || is_written(state, named.id)
}

fn is_written(state: &State, id: InodeId) -> bool {
    state.unsettled.contains_key(id) || state.sealing.contains(&id)
}

/// Fills a buffer from the beginning of a file; whether there was so much.
fn fill(file: &dyn DiskFile, buffer: &mut [u8]) -> Result<bool, FsError> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], filled as u64)? {
            0 => return Ok(false),
            count => filled += count,
        }
    }
    Ok(true)
}

/// What the record of a file has for such bytes.
fn checksum(file: &FileRecord, bytes: &[u8]) -> Checksum {
    match &file.role {
        Role::Page(page) => {
            let mut hasher = PageHasher::new();
            hasher.update(bytes);
            hasher.finish(&PageIdentity::from(page)).object
        }
        _ => content_checksum(bytes),
    }
}

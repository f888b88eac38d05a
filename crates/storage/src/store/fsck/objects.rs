//! The bytes behind every file: there, as long as they should be, and those that were written.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

use super::encoded;
use super::image::Image;
use crate::ingest::seal;
use crate::page::names;
use crate::store::StoreError;
use crate::store::disk::{Access, DiskPath, FileStat};
use crate::store::quarantine::Take;
use crate::store::record::{
    DirectoryClass, FileRecord, Inode, InodeId, ObjectId, ObjectKind, ObjectRecord, Role,
};

pub(super) fn check(image: &mut Image<'_>, progress: &dyn Fn(u64, u64)) -> Result<(), StoreError> {
    let files: BTreeMap<ObjectId, InodeId> =
        image.inodes.iter().filter_map(|(id, inode)| Some((inode.file()?.object?, *id))).collect();
    let total = files.iter().map(|(object, id)| bytes_to_read(image, *object, *id)).sum();
    let mut done = 0;
    // In the order of the numbers: objects written together lie together on the disk.
    for (object, id) in &files {
        progress(done, total);
        done += bytes_to_read(image, *object, *id);
        if image.lost.contains_key(id) {
            continue;
        }
        let Some(file) = image.inodes.get(id).and_then(Inode::file).cloned() else {
            continue;
        };
        if image.has_left(*object) {
            note_left(image, *object);
            continue;
        }
        let checked = check_file(image, (*id, *object), &file)?;
        let has_encoded = encoded::check(image, *object, &file)?;
        let Err(why) = checked else {
            continue;
        };
        let is_there = image.store.disk.stat(&DiskPath::Object(*object)).is_ok();
        if has_encoded && is_there {
            replace(image, *object, &why, "its encoded copy");
        } else if has_encoded {
            // As it should be.
        } else if !image.is_in_remote(*object) {
            image.lost.insert(*id, why);
        } else if is_there {
            if replace(image, *object, &why, "the remote's copy") {
                image.leave_to_remote(*object);
            }
        } else {
            image.report.only_remote += 1;
            image.leave_to_remote(*object);
        }
    }
    progress(total, total);
    let without: Vec<InodeId> = image
        .inodes
        .iter()
        .filter(|(_, inode)| inode.file().is_some_and(|file| file.object.is_none()))
        .map(|(id, _)| *id)
        .collect();
    for id in without {
        image.lost.insert(id, "has no bytes".to_owned());
    }
    drop_lost(image);
    Ok(())
}

/// What a file's object has for a check to read, as far as its record says the truth.
fn bytes_to_read(image: &Image<'_>, object: ObjectId, id: InodeId) -> u64 {
    let file = image.inodes.get(&id).and_then(Inode::file);
    let is_read = image.options.reads(object.0) && !image.has_left(object);
    file.filter(|_| is_read).map_or(0, |file| file.size)
}

/// The disk's raw copy of an object makes room for another one. Whether it did.
fn replace(image: &mut Image<'_>, object: ObjectId, why: &str, by: &str) -> bool {
    let what = format!("object {object}: {why}; {by} takes its place");
    match image.set_aside(object, Take::Move, &what) {
        Ok(()) => {
            image.find(&what, true);
            true
        }
        Err(hindrance) => {
            image.find(&format!("object {object}: {why}; {hindrance}"), false);
            false
        }
    }
}

/// Nothing is wrong with an object that has left. If its file is still there, a crash came before
/// it could be removed.
fn note_left(image: &mut Image<'_>, object: ObjectId) {
    image.report.only_remote += 1;
    if image.encoded.contains_key(&object) {
        image.find(&format!("object {object}: has left, but has an encoded copy, removed"), true);
        image.remove_encoded(object);
    }
    let path = DiskPath::Object(object);
    if image.store.disk.stat(&path).is_ok() {
        image.report.leftovers.unreferenced += 1;
        image.garbage.push(path);
    }
}

/// The inner error says why the file is lost.
fn check_file(
    image: &mut Image<'_>, (id, object): (InodeId, ObjectId), file: &FileRecord,
) -> Result<Result<(), String>, StoreError> {
    let stat = match image.store.disk.stat(&DiskPath::Object(object)) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Err(format!("the bytes of object {object} are missing")));
        }
        Err(error) => return Err(at(object, &error)),
    };
    let record = match image.objects.get(&object) {
        Some(record) => *record,
        None => make_record(image, (id, object), file, stat),
    };
    if file.unsettled {
        settle(image, (id, object), (file, &record), stat);
        return Ok(Ok(()));
    }
    if stat.length != file.size {
        return Ok(Err(format!(
            "object {object} has {} bytes instead of {}",
            stat.length, file.size
        )));
    }
    let Some(expected) = record.checksum else {
        return Ok(Ok(()));
    };
    if record.length != stat.length {
        return Ok(Err(format!(
            "object {object} has {} bytes, its record says {}",
            stat.length, record.length
        )));
    }
    if !image.options.reads(object.0) {
        return Ok(Ok(()));
    }
    let opened = image.store.open_object(object, Access::Read);
    let opened = opened.map_err(|error| at(object, &error))?;
    image.report.bytes_read += stat.length;
    let actual = match file.role {
        Role::Page(page) => seal::page_checksum(opened.as_ref(), &page),
        _ => seal::content_checksum(opened.as_ref()),
    };
    match actual {
        Ok(actual) if actual == expected => Ok(Ok(())),
        Ok(_) => Ok(Err(format!(
            "the bytes of object {object} are not those that were written (checksum mismatch)"
        ))),
        Err(error) if error.raw_os_error() == Some(libc::EIO) => {
            Ok(Err(format!("the bytes of object {object} cannot be read: {error}")))
        }
        Err(error) => Err(at(object, &error)),
    }
}

/// The disk failed in another way than at bytes that are lost: which file it was.
fn at(object: ObjectId, error: &io::Error) -> StoreError {
    let path = DiskPath::Object(object).relative();
    io::Error::new(error.kind(), format!("{}: {error}", path.display())).into()
}

/// A file that was being written: its bytes tell size and time, as after a crash.
fn settle(
    image: &mut Image<'_>, (id, object): (InodeId, ObjectId),
    (file, record): (&FileRecord, &ObjectRecord), stat: FileStat,
) {
    if record.checksum.is_some() {
        image.find(
            &format!("object {object}: has a checksum although its file may have changed"),
            true,
        );
        let checksum = None;
        image.put_object(object, ObjectRecord { checksum, ..*record });
    }
    if file.role.is_append_only() {
        return;
    }
    image.report.leftovers.unsettled += 1;
    if let Some(mut inode) = image.inodes.get(&id).cloned() {
        inode.mtime = stat.mtime;
        if let Some(file) = inode.file_mut() {
            file.size = stat.length;
            file.blocks = stat.blocks;
            file.unsettled = false;
        }
        image.put_inode(id, inode);
    }
}

/// The record of an object that has none; a page's checksum can be told from nothing else, so it
/// stays unknown until fsck is run again.
fn make_record(
    image: &mut Image<'_>, (id, object): (InodeId, ObjectId), file: &FileRecord, stat: FileStat,
) -> ObjectRecord {
    let kind = match file.role {
        Role::Page(_) => ObjectKind::Page,
        Role::Tail { .. } | Role::Tokens => ObjectKind::Rows,
        Role::Manifest => ObjectKind::Manifest,
        Role::Plain => ObjectKind::File,
    };
    let record = ObjectRecord { kind, length: stat.length, checksum: None, references: 1 };
    let what = format!("object {object} (inode {:016x}): has no record, made", id.0);
    image.find(&what, true);
    image.put_object(object, record);
    record
}

/// A lost file is a miss from now on: its names go, its bytes are kept aside.
fn drop_lost(image: &mut Image<'_>) {
    let lost = std::mem::take(&mut image.lost);
    let mut places: BTreeMap<InodeId, Vec<usize>> = BTreeMap::new();
    for (index, name) in image.names.iter().enumerate() {
        if name.kept && lost.contains_key(&name.inode) {
            places.entry(name.inode).or_default().push(index);
        }
    }
    // What became of the bytes: several files may have them.
    let mut aside: HashMap<ObjectId, Result<&str, String>> = HashMap::new();
    for (id, why) in &lost {
        let indexes = places.remove(id).unwrap_or_default();
        let of_sequence = indexes.iter().find(|index| says_where_rows_stand(image, **index));
        if let Some(index) = of_sequence {
            let path = image.path_of(*index);
            // As a miss it would make tokens count again that were removed, and rows that mean nothing.
            let what =
                format!("{path}: {why}; it stays, and its sequence cannot be used: remove that");
            image.find(&what, false);
            continue;
        }
        let paths: BTreeSet<String> = indexes.iter().map(|index| image.path_of(*index)).collect();
        let paths = Vec::from_iter(paths).join(", ");
        let what = if paths.is_empty() {
            format!("inode {:016x}: {why}", id.0)
        } else {
            format!("{paths}: {why}")
        };
        let object = image.inodes.get(id).and_then(Inode::file).and_then(|file| file.object);
        let end = match object {
            Some(object) => {
                aside.entry(object).or_insert_with(|| keep(image, object, &what)).clone()
            }
            None => Ok(MISS),
        };
        let end = match end {
            Ok(end) => end,
            Err(hindrance) => {
                image.find(&format!("{what}; {hindrance}"), false);
                continue;
            }
        };
        image.find(&format!("{what}; {end}"), true);
        for index in indexes {
            image.remove_name(index);
        }
        image.remove_inode(*id);
        if let Some(object) = object {
            image.remove_object(object);
        }
    }
}

/// Whether a name is that of the `positions.json` of a sequence.
fn says_where_rows_stand(image: &Image<'_>, index: usize) -> bool {
    let name = &image.names[index];
    name.name == names::POSITIONS.as_bytes()
        && image.class(name.parent) == Some(DirectoryClass::Sequence)
}

/// What becomes of a lost file of which nothing is left.
const MISS: &str = "a miss after repair";

/// Keeps the bytes of a lost object aside. What becomes of its files, or why nothing may.
fn keep(image: &mut Image<'_>, object: ObjectId, what: &str) -> Result<&'static str, String> {
    let Some(take) = kept(image, object) else { return Ok(MISS) };
    image.set_aside(object, take, what)?;
    Ok("a miss after repair, its bytes are kept in quarantine")
}

/// Which bytes of a lost object can be kept aside.
fn kept(image: &Image<'_>, object: ObjectId) -> Option<Take> {
    let ways = [(DiskPath::Object(object), Take::Move), (DiskPath::Encoded(object), Take::Encoded)];
    let mut there = ways.into_iter().filter(|(path, _)| image.store.disk.stat(path).is_ok());
    there.next().map(|(_, take)| take)
}

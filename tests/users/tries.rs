//! Tries of doors, each with what it proves by path.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use kvfs::reader::longest_prefix;

use crate::common::sys::{close, getxattr, setxattr};
use crate::doors::{Doors, LAYERS, POOLS};
use crate::rights;
use crate::user::User;

const MODEL: &str = "models/m";
const SEQUENCES: &str = "models/m/sequences";
const PAGE: &str = "0000000.safetensors";
const TAIL: &str = "0000032.tail";

/// A user tries one of the doors.
pub(crate) fn any(doors: &mut Doors, user: &User) {
    let sequence = doors.random.below(doors.sequences.len());
    match doors.random.below(13) {
        0 => ask(doors, user, sequence),
        1 | 2 => look_up_prefix(doors, user, sequence),
        3 => change_through_prefix(doors, user, sequence),
        4 => look_at_slot(doors, user, sequence),
        5 => read_slot(doors, user, sequence),
        6 => save_slot(doors, user, sequence),
        7 => register_block(doors, user, sequence),
        8 => look_at_block(doors, user, sequence),
        9 => withdraw_block(doors, user, sequence),
        10 => read_attribute(doors, user, sequence),
        11 => set_attribute(doors, user, sequence),
        _ => read_views(doors, user),
    }
}

fn layer(sequence: &str, layer: u32, file: &str) -> String {
    format!("{SEQUENCES}/{sequence}/{layer:03}/{file}")
}

fn tokens_of(sequence: &str) -> String {
    format!("{SEQUENCES}/{sequence}/tokens")
}

fn prefix_directory(doors: &Doors, sequence: usize) -> String {
    let hash = doors.sequences[sequence].hash.to_string();
    format!("{MODEL}/prefixes/{}/{hash}", &hash[..2])
}

/// Whether a user reads the tokens of a sequence by path, and sees its page in each layer.
fn knows(doors: &Doors, user: &User, sequence: &str) -> bool {
    doors.reads(user, &tokens_of(sequence)).is_some()
        && (0..LAYERS).all(|number| doors.sees(user, &layer(sequence, number, PAGE)))
}

fn ask(doors: &mut Doors, user: &User, sequence: usize) {
    let (model, prompt) = (doors.at(MODEL), doors.sequences[sequence].tokens.clone());
    let name = doors.sequences[sequence].name;
    doors.history.note(&format!("{} asks for the prompt of {name}", user.name));
    let found = user.does(move || longest_prefix(&model, &prompt).ok());
    let found = found.and_then(|found| found.sequence);
    doors.count("match", found.is_some());
    if let Some(found) = found {
        let found = found.file_name().unwrap().to_str().unwrap();
        doors.history.assert(knows(doors, user, found), || format!("{found} was found"));
    }
}

fn look_up_prefix(doors: &mut Doors, user: &User, sequence: usize) {
    let directory = prefix_directory(doors, sequence);
    let name = doors.sequences[sequence].name;
    doors.history.note(&format!("{} looks up the prefix of {name}", user.name));
    let is_there = doors.sees(user, &directory);
    doors.count("prefix", is_there);
    doors.history.assert(!is_there || knows(doors, user, name), || "it is there".to_owned());
    let number = u32::try_from(doors.random.below(LAYERS as usize)).unwrap();
    let read = doors.reads(user, &format!("{directory}/{number:03}.safetensors"));
    doors.count("page by prefix", read.is_some());
    if read.is_some() {
        let by_path = doors.reads(user, &layer(name, number, PAGE));
        doors.history.assert(read == by_path, || "its page was read".to_owned());
    }
}

/// Nothing goes, comes or is written through a prefix; what is said of an inode needs its path, too.
fn change_through_prefix(doors: &mut Doors, user: &User, sequence: usize) {
    let page = format!("{}/000.safetensors", prefix_directory(doors, sequence));
    let name = doors.sequences[sequence].name;
    doors.history.note(&format!("{} changes {name} through its prefix", user.name));
    let (at, other) = (doors.at(&page), doors.at("files/pools/other"));
    let (by_path, kind) = (layer(name, 0, PAGE), doors.random.below(6));
    let (door, outcome) = user.does(move || match kind {
        0 => ("unlink by prefix", fs::remove_file(at)),
        1 => ("write by prefix", File::options().write(true).open(at).map(drop)),
        2 => ("rename by prefix", crate::common::sys::rename(at, other)),
        3 => ("chmod by prefix", fs::set_permissions(at, Permissions::from_mode(0o644))),
        4 => ("pin by prefix", setxattr(at, "user.kvfs.pin", b"0")),
        _ => ("link by prefix", fs::hard_link(at, other)),
    });
    let is_done = outcome.is_ok();
    if kind < 3 {
        doors.history.assert(!is_done, || format!("{door} was done"));
        return;
    }
    doors.count(door, is_done);
    let may = doors.sees(user, &by_path);
    doors.history.assert(!is_done || may, || format!("{door} was done"));
    if is_done && kind == 5 {
        fs::remove_file(doors.at("files/pools/other")).unwrap();
    }
}

fn look_at_slot(doors: &mut Doors, user: &User, sequence: usize) {
    let name = doors.sequences[sequence].name;
    doors.history.note(&format!("{} looks at the slot of {name}", user.name));
    let slot = format!("{MODEL}/slots/{name}.bin");
    let is_seen = doors.sees(user, &slot);
    doors.count("stat of a slot", is_seen);
    // Where a group may read it, it is shown to all, and the kernel lets the group read.
    let is_of_group = is_seen && fs::metadata(doors.at(&slot)).unwrap().mode() & 0o044 == 0o040;
    let may = is_of_group || doors.sees(user, &tokens_of(name));
    doors.history.assert(!is_seen || may, || "its size was told".to_owned());
}

fn read_slot(doors: &mut Doors, user: &User, sequence: usize) {
    let name = doors.sequences[sequence].name;
    doors.history.note(&format!("{} reads the slot of {name}", user.name));
    let is_read = doors.reads(user, &format!("{MODEL}/slots/{name}.bin")).is_some();
    doors.count("slot", is_read);
    if is_read {
        let mut paths = vec![tokens_of(name)];
        paths.extend((0..LAYERS).map(|number| layer(name, number, PAGE)));
        paths.extend((0..LAYERS).map(|number| layer(name, number, TAIL)));
        let closed = paths.iter().find(|path| doors.reads(user, path).is_none());
        doors.history.assert(closed.is_none(), || format!("{closed:?} was in it"));
    }
}

fn save_slot(doors: &mut Doors, user: &User, sequence: usize) {
    let is_new = doors.random.one_in(3);
    let Some(made) = doors.sequences.get(sequence) else { return };
    let (name, bytes) = (if is_new { "new" } else { made.name }, made.slot.clone());
    doors.history.note(&format!("{} saves a slot as {name}", user.name));
    let sequences = doors.at(SEQUENCES);
    let may = rights::may_reach(user, &doors.at(""), &format!("{SEQUENCES}/x"))
        && rights::may_replace(user, &sequences, name);
    let at = doors.at(&format!("{MODEL}/slots/{name}.bin"));
    let outcome = user.does(move || {
        let mut slot = File::options().write(true).create(true).truncate(true).open(at)?;
        slot.write_all(&bytes)?;
        close(slot)
    });
    doors.count("saving a slot", outcome.is_ok());
    doors.history.assert(may || outcome.is_err(), || "it was saved".to_owned());
    if is_new && outcome.is_ok() {
        fs::remove_dir_all(sequences.join("new")).unwrap();
    }
}

/// The name of a block, and its path.
fn block_of(doors: &Doors, sequence: usize) -> (String, String) {
    let block = format!("{}.000", doors.sequences[sequence].hash);
    let path = format!("{MODEL}/blocks/{block}");
    (block, path)
}

fn may_replace_block(doors: &Doors, user: &User, block: &str) -> bool {
    let model = doors.at(MODEL);
    match doors.blocks.get(block) {
        Some((owner, _)) => rights::may_remove(user, &model, *owner),
        None => rights::may_change(user, &model),
    }
}

fn register_block(doors: &mut Doors, user: &User, sequence: usize) {
    let (block, path) = block_of(doors, sequence);
    let pool = *doors.random.pick(&POOLS);
    doors.history.note(&format!("{} registers {} in {pool}", user.name, &block[..4]));
    let may_read = doors.reads(user, pool).is_some();
    let may_write = may_replace_block(doors, user, &block);
    let text = format!(
        r#"{{"file":"{pool}","layer":0,"shape":[2,2,1],"sizes":[2048,2048],"offsets":[0,0,0,0]}}"#
    );
    let at = doors.at(&path);
    let outcome = user.does(move || {
        let mut file = File::options().write(true).create(true).truncate(true).open(at)?;
        file.write_all(text.as_bytes())?;
        close(file)
    });
    doors.count("registering a block", outcome.is_ok());
    doors.history.assert(outcome.is_err() || may_read, || "of a closed file".to_owned());
    doors.history.assert(outcome.is_err() || may_write, || "it was registered".to_owned());
    if outcome.is_ok() {
        doors.blocks.insert(block, (user.uid, pool));
    }
}

fn look_at_block(doors: &mut Doors, user: &User, sequence: usize) {
    let (block, path) = block_of(doors, sequence);
    doors.history.note(&format!("{} looks at {}", user.name, &block[..4]));
    let is_seen = doors.sees(user, &path);
    let is_read = doors.reads(user, &path).is_some();
    doors.count("stat of a block", is_seen);
    doors.count("block", is_read);
    if is_seen || is_read {
        let (owner, pool) = doors.blocks[&block];
        let may = owner == user.uid || doors.reads(user, pool).is_some();
        doors.history.assert(may, || format!("read: {is_read}, {pool} is closed"));
    }
}

fn withdraw_block(doors: &mut Doors, user: &User, sequence: usize) {
    let (block, path) = block_of(doors, sequence);
    doors.history.note(&format!("{} withdraws {}", user.name, &block[..4]));
    let may = may_replace_block(doors, user, &block);
    let at = doors.at(&path);
    let outcome = user.does(move || fs::remove_file(at));
    doors.count("withdrawing a block", outcome.is_ok());
    doors.history.assert(outcome.is_err() || may, || "it was withdrawn".to_owned());
    if outcome.is_ok() {
        doors.blocks.remove(&block);
    }
}

fn read_attribute(doors: &mut Doors, user: &User, sequence: usize) {
    let names = ["tier", "checksum", "stored_bytes", "pin", "moving", "encoding"];
    let attribute = format!("user.kvfs.{}", doors.random.pick(&names));
    let name = doors.sequences[sequence].name;
    let by_path = layer(name, 0, PAGE);
    let by_prefix = format!("{}/000.safetensors", prefix_directory(doors, sequence));
    let path = if doors.random.is_true() { by_path.clone() } else { by_prefix };
    doors.history.note(&format!("{} reads {attribute} of {path}", user.name));
    let at = doors.at(&path);
    let is_told = user.does(move || getxattr(at, &attribute).is_ok());
    doors.count("attribute", is_told);
    let may = doors.reads(user, &by_path).is_some();
    doors.history.assert(!is_told || may, || "it was told".to_owned());
}

/// Limits are their owner's, and what concerns the whole mount is root's.
fn set_attribute(doors: &mut Doors, user: &User, sequence: usize) {
    let sequence = format!("{SEQUENCES}/{}", doors.sequences[sequence].name);
    let years = "1000000000";
    let (door, path, attribute, value) = match doors.random.below(4) {
        0 => ("quota", sequence, "user.kvfs.quota", years),
        1 => ("age", MODEL.to_owned(), "user.kvfs.age", years),
        2 => ("ttl", POOLS[0].to_owned(), "user.kvfs.ttl", years),
        _ => ("collection", String::new(), "user.kvfs.gc", "dry-run"),
    };
    doors.history.note(&format!("{} sets {attribute} of {path:?}", user.name));
    let at = doors.at(&path);
    let owner = fs::metadata(&at).unwrap().uid();
    let outcome = user.does(move || setxattr(at, attribute, value.as_bytes()));
    let is_set = outcome.is_ok();
    doors.count(door, is_set);
    let may = user.uid == 0 || user.uid == owner;
    doors.history.assert(!is_set || may, || format!("{attribute} was set"));
}

fn read_views(doors: &mut Doors, user: &User) {
    let view = *doors
        .random
        .pick(&["status", "metrics", "config", "errors", "events", "hottest", "page", "uses"]);
    doors.history.note(&format!("{} reads {view}", user.name));
    let is_read = doors.reads(user, &format!(".kvfs/{view}")).is_some();
    doors.count("view", is_read);
    doors.history.assert(!is_read || user.uid == 0, || "it was read".to_owned());
}

//! What another machine that shares the remote shows of the sequences of this one.
//!
//! Root makes sequences on the first machine, gives them owners and modes, renames and removes them. After each
//! round, when the second one has read what the first one has published, users ask there for the same sequences by
//! all their doors. The oracle of an answer is the path on the first machine: what somebody cannot read there is
//! nowhere on the second.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::PathBuf;

use kvfs::page::PrefixHash;
use kvfs::reader::longest_prefix;

use crate::History;
use crate::common::forks::no_forks;
use crate::common::mount::scratch_directory;
use crate::common::random::Random;
use crate::common::sys::{getxattr, rename, setxattr};
use crate::common::{Mode, Model, Mount, eventually};
use crate::rights::Owned;
use crate::user::{TEAM, User, below, everybody};
use crate::writer::{Sequence, bytes};

as_root!((fuse, root) another_machine_shows_no_more_than_paths_here);

/// Operations of a round: most of them tries.
const OPERATIONS_OF_ROUND: usize = 500;
const CHANGES_OF_ROUND: usize = 60;
const SEQUENCES_MAX: usize = 24;
/// A page and some rows, in two layers.
const TOKENS: u32 = 40;
const OWNERS: [(u32, u32); 5] = [(0, 0), (1001, 1001), (1002, TEAM), (1003, 1003), (1003, TEAM)];
const DIRECTORY_MODES: [u32; 10] =
    [0o755, 0o755, 0o755, 0o755, 0o777, 0o700, 0o750, 0o705, 0o711, 0o055];
const FILE_MODES: [u32; 9] = [0o644, 0o644, 0o644, 0o644, 0o666, 0o600, 0o640, 0o604, 0o044];

/// A sequence of the first machine.
struct Made {
    name: String,
    tokens: Vec<u32>,
    hash: String,
}

impl Made {
    fn page(&self, layer: u32) -> String {
        format!("models/m/sequences/{}/{layer:03}/0000000.safetensors", self.name)
    }
}

/// Two machines.
struct Machines {
    first: Mount,
    second: Mount,
    opened: [File; 2],
    model: Model,
    users: [User; 4],
    random: Random,
    history: History,
    made: Vec<Made>,
    /// What was removed: nobody reads it by path any more.
    gone: Vec<Made>,
    number: u32,
    /// Tries that got through, and those that did not.
    counts: [usize; 2],
}

impl Machines {
    fn new(mode: Mode, remote: &str, seed: u64) -> Machines {
        let often = ["--commit-interval", "0.05", "--remote-index", "0.1"];
        let options = [&often[..], &["--remote", remote, "--rebuild-from", "none"]].concat();
        let [first, second] = [(); 2].map(|()| Mount::with_options(mode, &options));
        let model = Model::small().named("m");
        for mount in [&first, &second] {
            model.install(mount);
        }
        Machines {
            opened: [&first, &second].map(|mount| File::open(mount.path()).unwrap()),
            first,
            second,
            model,
            users: everybody(),
            random: Random::of(seed),
            history: History::of(seed),
            made: Vec::new(),
            gone: Vec::new(),
            number: 0,
            counts: [0; 2],
        }
    }

    fn here(&self, path: &str) -> PathBuf {
        below(&self.opened[0], path)
    }

    fn there(&self, path: &str) -> PathBuf {
        below(&self.opened[1], path)
    }

    /// A new sequence that everybody may read.
    fn make(&mut self) -> Made {
        self.number += 1;
        let name = format!("s{}", self.number);
        let tokens: Vec<u32> = (0..TOKENS).map(|token| self.number * 1000 + token).collect();
        self.history.note(&format!("root makes {name}"));
        Sequence::new(&self.model, &name).append(&self.first, &self.model, &tokens);
        let page = &bytes(&tokens)[..self.model.page_tokens() as usize * 4];
        Made { name, tokens, hash: PrefixHash::next(None, page).to_string() }
    }

    fn change(&mut self) {
        if self.made.len() < SEQUENCES_MAX / 2 || self.random.one_in(8) {
            let made = self.make();
            self.made.push(made);
        }
        let chosen = self.random.below(self.made.len());
        let directory = format!("models/m/sequences/{}", self.made[chosen].name);
        match self.random.below(12) {
            0 => {
                let made = self.made.swap_remove(chosen);
                self.history.note(&format!("root removes {}", made.name));
                fs::remove_dir_all(self.here(&directory)).unwrap();
                self.gone.push(made);
            }
            1 => {
                self.number += 1;
                let name = format!("r{}", self.number);
                self.history.note(&format!("root renames {directory} to {name}"));
                let to = self.here(&format!("models/m/sequences/{name}"));
                rename(self.here(&directory), to).unwrap();
                self.made[chosen].name = name;
            }
            2 => self.change_mode("models/m/sequences", true),
            3..=5 => self.change_mode(&directory, true),
            6 | 7 => self.change_mode(&format!("{directory}/001"), true),
            8 | 9 => self.change_mode(&format!("{directory}/tokens"), false),
            _ => self.change_mode(&self.made[chosen].page(1), false),
        }
        let first = self.made.len().saturating_sub(SEQUENCES_MAX);
        self.made.drain(..first).for_each(drop);
    }

    /// Another mode, and often another owner.
    fn change_mode(&mut self, path: &str, is_directory: bool) {
        let modes = if is_directory { &DIRECTORY_MODES[..] } else { &FILE_MODES };
        let mode = *self.random.pick(modes);
        let (uid, gid) = *self.random.pick(&OWNERS);
        self.history.note(&format!("root gives {path} to {uid}:{gid}, {mode:o}"));
        chown(self.here(path), Some(uid), Some(gid)).unwrap();
        fs::set_permissions(self.here(path), Permissions::from_mode(mode)).unwrap();
    }

    /// Waits until the second machine knows what the first one has by now.
    fn publish(&mut self) {
        let above = self.here("models/m/sequences");
        let modes = |mode| fs::set_permissions(&above, Permissions::from_mode(mode)).unwrap();
        let found = fs::metadata(&above).unwrap();
        // One closed directory hides most of what is to be tried.
        let closed = Some(found.mode() & 0o7777).filter(|_| !self.random.is_true());
        modes(0o755);
        let is_uploaded = |mount: &Mount| mount.status("remote_waiting_files") == "0";
        eventually("the pages to be in the remote", || is_uploaded(&self.first).then_some(()));
        let marker = self.make();
        self.collect();
        let prefix = self.there(&Machines::prefix(&marker));
        eventually("the other machine to hear of it", || prefix.exists().then_some(()));
        if let Some(mode) = closed {
            modes(mode);
            self.collect();
            let owner = if found.uid() == 0 { 0 } else { 0o100 };
            if mode & (owner | 0o011) != owner | 0o011 {
                eventually("the prefix to be forgotten", || (!prefix.exists()).then_some(()));
            }
        }
        fs::remove_dir_all(self.here(&format!("models/m/sequences/{}", marker.name))).unwrap();
        // What it took over when that was open stays with it, and is another sequence from then on.
        let sequences = self.there("models/m/sequences");
        for taken_over in fs::read_dir(&sequences).unwrap() {
            fs::remove_dir_all(taken_over.unwrap().path()).unwrap();
        }
    }

    /// A collection of garbage publishes the names.
    fn collect(&self) {
        let root = self.here("");
        let gc = "user.kvfs.gc";
        eventually("a collection to end", || setxattr(&root, gc, b"dry-run").ok());
        eventually("the names to be published", || {
            (getxattr(&root, gc).unwrap() != "running").then_some(())
        });
    }

    fn prefix(made: &Made) -> String {
        format!("models/m/prefixes/{}/{}", &made.hash[..2], made.hash)
    }

    /// Whether a user reads the tokens of a sequence and the pages of so many layers where it was made.
    fn may_read(&self, user: &User, made: &Made, layers: u32) -> bool {
        let mut paths = vec![format!("models/m/sequences/{}/tokens", made.name)];
        paths.extend((0..layers).map(|layer| made.page(layer)));
        let paths: Vec<PathBuf> = paths.iter().map(|path| self.here(path)).collect();
        user.does(move || paths.iter().all(|path| fs::read(path).is_ok()))
    }

    /// Of a sequence where it was made.
    fn modes(&self, made: &Made) -> Vec<String> {
        let sequence = format!("models/m/sequences/{}", made.name);
        let paths = ["models/m/sequences".to_owned(), sequence.clone()].into_iter();
        let inside = ["tokens", "000", "001"].map(|inside| format!("{sequence}/{inside}"));
        let paths = paths.chain(inside).chain((0..2).map(|layer| made.page(layer)));
        let owned = |path: &String| {
            let metadata = fs::symlink_metadata(self.here(path));
            metadata.map(|metadata| Owned::from(&metadata))
        };
        paths.map(|path| format!("{path} {:?}", owned(&path).ok())).collect()
    }

    /// A user asks on the second machine for a sequence of the first one.
    fn ask(&mut self) {
        let is_gone = !self.gone.is_empty() && self.random.one_in(8);
        let from = if is_gone { &self.gone } else { &self.made };
        let made = &from[self.random.below(from.len())];
        let user = &self.users[self.random.below(self.users.len())];
        let prefix = Machines::prefix(made);
        let kind = self.random.below(6);
        let store = names_of(&self.there("models/m/sequences"))
            .into_iter()
            .find(|name| name.starts_with(&format!("{}@", made.name)));
        let taken_over = store.unwrap_or_else(|| made.name.clone());
        let layer = self.random.below(2);
        let door = match kind {
            0 => format!("{prefix}/{layer:03}.safetensors"),
            1 => prefix,
            2 => format!("models/m/blocks/{}.000", made.hash),
            3 => format!("models/m/slots/{taken_over}.bin"),
            4 => format!("models/m/sequences/{taken_over}/tokens"),
            _ => "models/m".to_owned(),
        };
        self.history.note(&format!("{} asks for {} by {door}, {kind}", user.name, made.name));
        let (at, tokens) = (self.there(&door), made.tokens.clone());
        let is_through = user.does(move || match kind {
            // That somebody has it is a secret, too: whoever guesses what was said would know it.
            1 => at.exists(),
            5 => longest_prefix(&at, &tokens).is_ok_and(|found| found.sequence.is_some()),
            _ => fs::read(at).is_ok(),
        });
        self.counts[usize::from(!is_through)] += 1;
        if is_through {
            // Who may read the tokens knows that they are there.
            let layers = if kind == 1 { 0 } else { 2 };
            let closed = self.users.iter().find(|user| !self.may_read(user, made, layers));
            self.history.assert(closed.is_none(), || {
                let there = names_of(&self.there("models/m/sequences"));
                let modes = self.modes(made);
                format!(
                    "{} got it, and {:?} may not read it: {modes:?}, there are {there:?}",
                    user.name,
                    closed.unwrap().name
                )
            });
        }
    }

    /// A user reads everything that has appeared on the second machine.
    fn look_around(&mut self) {
        for name in names_of(&self.there("models/m/sequences")) {
            let made = name.split('@').next().unwrap();
            let known = self.made.iter().find(|known| known.name == made);
            let closed = |made| self.users.iter().any(|user| !self.may_read(user, made, 2));
            let is_open = known.is_some_and(|made| !closed(made));
            self.history.assert(is_open, || format!("{name} has appeared"));
        }
    }
}

fn names_of(directory: &std::path::Path) -> Vec<String> {
    let Ok(names) = fs::read_dir(directory) else { return Vec::new() };
    names.flatten().map(|entry| entry.file_name().into_string().unwrap()).collect()
}

fn another_machine_shows_no_more_than_paths_here(mode: Mode) {
    let begun = std::time::Instant::now();
    let remote = scratch_directory();
    let (seed, count) = (crate::seed(), crate::operations());
    let mut machines = Machines::new(mode, remote.path().to_str().unwrap(), seed);
    for _ in 0..count.div_ceil(OPERATIONS_OF_ROUND) {
        let _quiet = no_forks();
        (0..CHANGES_OF_ROUND).for_each(|_| machines.change());
        machines.publish();
        (CHANGES_OF_ROUND..OPERATIONS_OF_ROUND).for_each(|_| machines.ask());
        machines.look_around();
    }
    let [through, kept] = machines.counts;
    println!("seed {seed}: {through} tries got through, {kept} did not, {:?}", begun.elapsed());
    assert!(count < 5_000 || through > 100 && kept > 100);
    assert_eq!(machines.second.status("errors"), "0");
}

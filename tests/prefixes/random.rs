//! Random sequences, random changes, and after each the answers of a plain list.

use kvfs::reader::longest_prefix;

use crate::common::sys::{rename, sync_directory};
use crate::common::{Mode, Model, Mount, fill};
use crate::writer::Sequence;

in_both_modes!(answers_are_those_of_a_plain_list);

const STEPS: usize = 120;

/// Numbers that follow from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 += 1;
        let bytes = fill(self.0, 8);
        let number = u64::from_le_bytes(bytes.try_into().unwrap());
        usize::try_from(number % bound as u64).unwrap()
    }

    /// Few different tokens, so that much begins alike.
    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| u32::try_from(self.below(2)).unwrap()).collect()
    }
}

struct World {
    mount: Mount,
    model: Model,
    sequences: Vec<Sequence>,
    made: usize,
    random: Random,
}

impl World {
    fn new_name(&mut self) -> String {
        self.made += 1;
        format!("chat-{}", self.made)
    }

    /// A sequence that begins like another one.
    fn add(&mut self) {
        let name = self.new_name();
        let mut sequence = Sequence::new(&self.model, &name);
        let mut tokens = Vec::new();
        if !self.sequences.is_empty() {
            let other = self.random.below(self.sequences.len());
            let other = self.sequences[other].tokens.clone();
            tokens.extend_from_slice(&other[..self.random.below(other.len() + 1)]);
        }
        let count = self.random.below(50);
        tokens.extend(self.random.tokens(count));
        sequence.append(&self.mount, &self.model, &tokens);
        self.sequences.push(sequence);
    }

    fn change(&mut self) {
        if self.sequences.len() < 4 {
            return self.add();
        }
        let index = self.random.below(self.sequences.len());
        let what = self.random.below(9);
        let (count, layer) = (self.random.below(40), self.random.below(2));
        let tokens = self.random.tokens(count);
        let name = self.new_name();
        let World { mount, model, sequences, .. } = self;
        let is_whole = |it: &Sequence| it.rows.iter().all(|rows| *rows == it.tokens.len() as u64);
        let sequence = &mut sequences[index];
        match what {
            0 => self.add(),
            1 | 2 if is_whole(sequence) => sequence.append(mount, model, &tokens),
            // Rows are still to come.
            3 if is_whole(sequence) => sequence.append_tokens(mount, model, &tokens),
            4 => sequence.drop_last(mount, model, layer),
            5 => {
                std::fs::remove_dir_all(model.sequence(mount, &sequence.name)).unwrap();
                sequences.remove(index);
            }
            6 => {
                let from = model.sequence(mount, &sequence.name);
                rename(from, model.sequence(mount, &name)).unwrap();
                sequence.name = name;
            }
            7 => sequence.replace_tokens(mount, model, tokens, layer == 0),
            _ => {
                let fork = sequence.fork(mount, model, &name);
                sequences.push(fork);
            }
        }
    }

    fn check(&mut self) {
        let from = self.random.below(self.sequences.len());
        let from = self.sequences[from].tokens.clone();
        let mut prompt = from[..self.random.below(from.len() + 1)].to_vec();
        let more = self.random.below(60);
        prompt.extend(self.random.tokens(more));
        let found = longest_prefix(&self.model.directory(&self.mount), &prompt).unwrap();
        let best = self.sequences.iter().map(|sequence| sequence.shares(&prompt)).max().unwrap();
        assert_eq!(found.tokens, best, "seed {}: {:?}", self.random.0, self.sequences);
        let Some(path) = found.sequence else {
            return assert_eq!(best, 0);
        };
        let name = path.file_name().unwrap().to_str().unwrap();
        let named = self.sequences.iter().find(|sequence| sequence.name == name).unwrap();
        assert_eq!(named.shares(&prompt), best, "{name}");
    }
}

fn answers_are_those_of_a_plain_list(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let seed = std::env::var("KVFS_TEST_SEED").map_or(1, |seed| seed.parse().unwrap());
    eprintln!("KVFS_TEST_SEED={seed}");
    let random = Random(seed << 32);
    let mut world = World { mount, model, sequences: Vec::new(), made: 0, random };
    world.add();
    for step in 0..STEPS {
        world.change();
        (0..3).for_each(|_| world.check());
        match step {
            40 => world.mount.remount(),
            80 => {
                // What was synced is there after a crash, and so are the answers.
                sync_directory(world.mount.path()).unwrap();
                world.mount.crash();
            }
            _ => {}
        }
    }
}

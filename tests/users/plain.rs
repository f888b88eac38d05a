//! Ordinary names: `files/` and a directory of the disk answer all users alike.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;

use crate::common::forks::no_forks;
use crate::common::random::Random;
use crate::common::{Mode, Mount};
use crate::operation::{Operation, Tree};
use crate::user::{below, everybody};
use crate::{History, tree};

as_root!((fuse, root) names_are_as_on_a_disk);

/// Operations between two comparisons of the whole trees.
const COMPARED_EVERY: usize = 250;
/// Operations after which both trees are emptied: in the end users close everything.
const EMPTIED_EVERY: usize = 2_000;

pub(crate) fn names_are_as_on_a_disk(mode: Mode) {
    let begun = std::time::Instant::now();
    let mount = Mount::new(mode);
    let places = [mount.files("twin"), mount.beside("twin")];
    let users = everybody();
    let (seed, count) = (crate::seed(), crate::operations());
    let (mut random, mut history) = (Random::of(seed), History::of(seed));
    let (mut done, mut refused) = (0, 0);
    for first in (0..count).step_by(EMPTIED_EVERY) {
        let opened = places.each_ref().map(|place| {
            fs::create_dir(place).unwrap();
            fs::set_permissions(place, Permissions::from_mode(0o777)).unwrap();
            File::open(place).unwrap()
        });
        let trees = opened.each_ref().map(|directory| Tree::new(below(directory, "")));
        for number in first..count.min(first + EMPTIED_EVERY) {
            let _quiet = no_forks();
            let (user, operation) = (random.pick(&users), Operation::any(&mut random));
            history.note(format!("{} {operation:?}", user.name));
            let [kvfs, disk] = trees.each_ref().map(|tree| {
                let (tree, operation) = (tree.clone(), operation.clone());
                user.does(move || tree.answer(&operation))
            });
            history.assert(kvfs == disk, || format!("kvfs says {kvfs:?}, the disk {disk:?}"));
            *(if kvfs.is_ok() { &mut done } else { &mut refused }) += 1;
            if number % COMPARED_EVERY == 0 {
                compare(&trees, &history);
            }
        }
        compare(&trees, &history);
        drop((trees, opened));
        places.iter().for_each(|place| fs::remove_dir_all(place).unwrap());
    }
    println!("seed {seed}: {done} done, {refused} refused alike, {:?}", begun.elapsed());
    assert!(count < 1000 || done > count / 10 && refused > count / 10, "{done} {refused}");
    assert_eq!(mount.status("errors"), "0", "{:?}", mount.errors());
}

#[track_caller]
fn compare(trees: &[Tree; 2], history: &History) {
    let [kvfs, disk] = trees.each_ref().map(|tree| tree::lines(&tree.root));
    let differs = kvfs.iter().zip(&disk).find(|(kvfs, disk)| kvfs != disk);
    history.assert(kvfs == disk, || format!("the trees differ: {differs:?}"));
}

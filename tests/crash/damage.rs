//! Every persisted file is damaged: a bit flipped, a sector of zeros, an end cut off. What is read is
//! what was written, or an error; nothing panics, and the daemon goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvfs::fs::FsError;
use kvfs::page::names;
use kvfs::store::disk::DiskPath;

use crate::common::random::Random;
use crate::content::Content;
use crate::cut::Image;
use crate::driver::{Driver, Recording, WentWrong};
use crate::log::Name;
use crate::model::What;
use crate::mounted::{Berth, Mounted};
use crate::power::{seed, setting};
use crate::workloads::{ALL, Workload};

/// Damaged images, unless `KVFS_SIM_DAMAGES` says otherwise.
const DAMAGES: usize = 2_000;

/// What a store holds at the end of a workload, unmounted in good order.
fn at_rest(berth: &Berth, workload: &Workload) -> (Image, Recording) {
    let mut driver = Driver::new(berth, workload.setup, &WentWrong::default());
    (workload.run)(&mut driver);
    assert!(driver.unmount());
    let mut image = driver.disk.image();
    image.remote = driver.blobs();
    (image, driver.into_recording())
}

/// One way to damage a file; what was done.
fn damage(content: &mut Content, random: &mut Random) -> String {
    let length = usize::try_from(content.length()).unwrap();
    let at = random.below(length);
    match random.below(4) {
        0 => {
            content.set_length(at as u64);
            format!("cut to {at} of {length} bytes")
        }
        1 => {
            let start = at / 512 * 512;
            content.write(start as u64, &vec![0; 512.min(length - start)]);
            format!("zeros from {start} of {length}")
        }
        _ => {
            let mut byte = [0];
            content.read(at as u64, &mut byte);
            let flipped = byte[0] ^ (1 << random.below(8));
            content.write(at as u64, &[flipped]);
            format!("byte {at} of {length} is {flipped:#x}, not {:#x}", byte[0])
        }
    }
}

/// What somebody sees who reads everything, as long as the store can be mounted.
fn read_all(berth: &Berth, image: &Image, recording: &Recording) -> Result<Outcome, String> {
    let disk = crate::disk::SimulatedDisk::holding(image);
    let setup = crate::mounted::Setup { ram_bytes: None, ..recording.setup };
    let mounted = match Mounted::open(berth, &disk, &image.remote, setup) {
        Ok(mounted) => mounted,
        Err(error) => {
            let text = error.to_string();
            let says_what_to_do = text.contains("kvfs fsck") || !matches!(error, FsError::Store(_));
            return if says_what_to_do { Ok(Outcome::Refused) } else { Err(text) };
        }
    };
    let mut is_missed = false;
    for (path, expected) in recording.history.tree() {
        let What::File(key) = expected.what else { continue };
        match mounted.read(path) {
            Ok(bytes) if bytes == *recording.history.bytes(key) => {}
            // Rows have no checksum before they are sealed.
            Ok(_) if is_rows(path) => is_missed = true,
            Ok(bytes) => return Err(format!("{path}: {} wrong bytes", bytes.len())),
            Err(_) => is_missed = true,
        }
    }
    Ok(if is_missed { Outcome::Missed } else { Outcome::Harmless })
}

fn is_rows(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default().as_bytes();
    name == names::TOKENS.as_bytes() || names::parse_tail(name).is_some()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The store could not be mounted, and says what to do.
    Refused,
    /// Some file gives an error.
    Missed,
    /// Everything can be read.
    Harmless,
}

fn damage_each_file(workload: &Workload, count: usize, seed: u64) -> Result<String, String> {
    let berth = Berth::new();
    let (image, recording) = at_rest(&berth, workload);
    let mut random = Random::of(seed);
    let mut outcomes = [0; 3];
    for round in 0..count {
        let mut image = image.clone();
        let whole: Vec<usize> =
            (0..image.files.len()).filter(|index| image.files[*index].1.length() > 0).collect();
        let (name, content) = &mut image.files[whole[round % whole.len()]];
        let what = format!("{name:?}: {}", damage(content, &mut random));
        let outcome = catch_unwind(AssertUnwindSafe(|| read_all(&berth, &image, &recording)));
        match outcome {
            Ok(Ok(outcome)) => outcomes[outcome as usize] += 1,
            Ok(Err(why)) => return Err(format!("{}: {what}: {why}", workload.name)),
            Err(_) => return Err(format!("{}: {what}: a panic", workload.name)),
        }
    }
    let [refused, missed, harmless] = outcomes;
    Ok(format!("{}: {refused} refused, {missed} missed, {harmless} harmless", workload.name))
}

#[test]
fn damage_is_an_error_and_never_wrong_bytes() {
    let (count, seed) = (setting("KVFS_SIM_DAMAGES", DAMAGES), seed());
    let mut wrong = Vec::new();
    for workload in ALL {
        match damage_each_file(&workload, count / ALL.len(), seed) {
            Ok(outcomes) => println!("{outcomes}, seed {seed}"),
            Err(why) => wrong.push(why),
        }
    }
    assert!(wrong.is_empty(), "KVFS_SIM_SEED={seed}: {}", wrong.join("\n"));
}

/// The files of which a store consists are all damaged by the test above.
#[test]
fn every_kind_of_file_is_damaged() {
    let berth = Berth::new();
    let mut kinds = std::collections::BTreeSet::new();
    for workload in ALL {
        for (name, content) in at_rest(&berth, &workload).0.files {
            if let Name::File(path) = name
                && content.length() > 0
            {
                kinds.insert(match path {
                    DiskPath::Format => "FORMAT",
                    DiskPath::Metadata => "meta.redb",
                    DiskPath::Object(_) => "objects",
                    DiskPath::Encoded(_) => "encoded copies",
                    DiskPath::Pack(_) => "packs",
                    // Nobody reads it.
                    DiskPath::Reserve => continue,
                    _ => "others",
                });
            }
        }
    }
    assert_eq!(
        Vec::from_iter(kinds),
        ["FORMAT", "encoded copies", "meta.redb", "objects", "packs"]
    );
}

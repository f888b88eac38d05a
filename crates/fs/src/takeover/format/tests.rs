use super::*;
use std::path::PathBuf;

use crate::takeover::{LeftOpen, LiveRings, LiveSlot, hand_over};
use crate::unmounted::{FILES, Unmounted};
use kvfs_storage::store::record::{InodeId, ObjectId};

fn sample() -> Handover {
    let launch = Launch {
        program: PathBuf::from("/usr/bin/kvfs"),
        arguments: ["kvfs", "mount", "s", "m"].map(Into::into).to_vec(),
        directory: PathBuf::from("/root"),
        store: PathBuf::from("/s"),
        mountpoint: PathBuf::from("/m"),
        settings: "verify=always\n".to_owned(),
        configuration: "verify = \"always\"\n".to_owned(),
        capabilities: 1 << 21,
    };
    let backing = LiveBacking {
        inode: InodeId(7),
        id: 3,
        count: 2,
        is_sealed: true,
        idle_since: Some(9),
        file: (2049, 12),
        left: Some(LeftOpen::Held(5)),
    };
    let slots = [(0, true), (1, false)].map(|(queue, is_holding)| LiveSlot { queue, is_holding });
    let rings = LiveRings { memory: 8, address: 1 << 44, slots: slots.to_vec(), retrieved: 9 };
    let descriptors = Descriptors {
        device: 5,
        lock: 6,
        request_bytes_max: 1 << 20,
        rings: Some(rings),
        no_rings: "turned off by option".to_owned(),
        keeper: Some(10),
    };
    Handover {
        launch,
        descriptors: Some(descriptors),
        live: None,
        backings: vec![backing],
        wishes: vec![(InodeId(7), ObjectId(8))],
        ram: None,
        keys: Some(Secret("key".to_owned())),
        exchanges: 4,
        since: 1_700_000_000,
        death: Some(Death { deaths: 2, touched: 11, backings: 12 }),
    }
}

#[test]
fn what_was_written_is_read() {
    let before = sample();
    let after = Handover::from_bytes(&before.to_bytes()).unwrap();
    assert_eq!(after.launch, before.launch);
    assert_eq!(after.descriptors, before.descriptors);
    assert_eq!(after.backings, before.backings);
    assert_eq!((&after.keys, &after.wishes), (&before.keys, &before.wishes));
    assert_eq!(format!("{:?}", after.keys), "Some(Secret)", "no log has it");
    assert_eq!((after.exchanges, after.since, after.death), (4, 1_700_000_000, before.death));
    assert!(after.live.is_none());
}

#[test]
fn what_a_file_system_has_in_memory_is_the_same_afterwards() {
    let unmounted = Unmounted::new();
    let id = unmounted.write(FILES, "file", b"bytes");
    crate::takeover::prepare(&unmounted.fs).unwrap();
    let bytes = hand_over(&unmounted.fs, encode).unwrap();
    let again: Live = decode(&bytes).unwrap();
    assert_eq!(encode(&again), bytes);
    let state = unmounted.fs.core.state();
    assert_eq!(again.size(), (state.nodes.len(), state.handles.len()));
    assert!(state.nodes.contains_key(&id), "the nodes are back");
}

#[test]
fn bytes_that_are_cut_or_changed_are_refused() {
    let bytes = sample().to_bytes();
    for length in 0..bytes.len() {
        assert!(Handover::from_bytes(&bytes[..length]).is_err(), "{length}");
    }
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            assert!(Handover::from_bytes(&changed).is_err(), "bit {bit} of byte {at}");
        }
    }
    let longer = [bytes.as_slice(), b"\0"].concat();
    assert_eq!(Handover::from_bytes(&longer).unwrap_err(), FormatError::Damaged);
}

#[test]
fn another_version_is_told() {
    let mut bytes = sample().to_bytes();
    bytes[8..12].copy_from_slice(&(FORMAT + 1).to_le_bytes());
    let error = Handover::from_bytes(&bytes).unwrap_err();
    assert_eq!(error, FormatError::Version(FORMAT + 1));
    assert!(error.to_string().contains(&format!("reads format {FORMAT}")), "{error}");
    assert_eq!(Handover::from_bytes(b"").unwrap_err(), FormatError::Unknown);
    assert_eq!(Handover::from_bytes(&[0; 64]).unwrap_err(), FormatError::Unknown);
}

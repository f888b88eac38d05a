//! Whatever is done to the bytes of a sealed object, what is passed on is what was sealed, and an
//! object that was changed is not opened.

use super::*;
use crate::marker::RemoteId;
use crate::seal::KeyRing;
use crate::transfer::MemorySink;

const NAME: &str = "blobs/ab/cd.raw";

fn keys() -> Arc<[Subkeys]> {
    let ring: KeyRing = KeyRing::generate().unwrap().parse().unwrap();
    ring.subkeys(RemoteId(1)).into()
}

fn plain(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 31 + index / 251).to_le_bytes()[0]).collect()
}

/// Read in steps of so many bytes.
fn seal_in_steps(bytes: &[u8], keys: &[Subkeys], name: &str, step: usize) -> Vec<u8> {
    let source = SealedSource::new(Source::of(bytes.to_vec()), &keys[0], name).unwrap();
    let mut sealed = Vec::new();
    let mut buffer = vec![0; step];
    loop {
        let count = source.read_at(&mut buffer, sealed.len() as u64).unwrap();
        if count == 0 {
            return sealed;
        }
        sealed.extend_from_slice(&buffer[..count]);
    }
}

fn seal(bytes: &[u8], keys: &[Subkeys]) -> Vec<u8> {
    seal_in_steps(bytes, keys, NAME, 1 << 20)
}

/// What is passed on, and whether the object was opened.
fn open_in_steps(
    sealed: &[u8], keys: &Arc<[Subkeys]>, name: &str, step: usize,
) -> (Vec<u8>, Result<u64, Problem>) {
    let sink = MemorySink::new(sealed.len());
    let unsealer = Unsealer::new(keys, name.to_owned(), sink.clone());
    for (index, part) in sealed.chunks(step).enumerate() {
        if unsealer.write_all_at(part, (index * step) as u64).is_err() {
            return (sink.take(), Err(unsealer.problem().unwrap()));
        }
    }
    let outcome = unsealer.finish().map_err(|failure| match failure {
        Failure::Problem(problem) => problem,
        Failure::Sink(error) => panic!("{error}"),
    });
    (sink.take(), outcome)
}

fn open(sealed: &[u8], keys: &Arc<[Subkeys]>) -> Result<Vec<u8>, Problem> {
    let (bytes, outcome) = open_in_steps(sealed, keys, NAME, 1 << 20);
    outcome.map(|_| bytes)
}

#[test]
fn objects_of_all_sizes_come_back_whatever_the_steps() {
    let keys = keys();
    for length in [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES + 7] {
        let bytes = plain(length);
        for step in [7001, SEALED_FRAME_BYTES, 1 << 20] {
            let sealed = seal_in_steps(&bytes, &keys, NAME, step);
            assert_eq!(sealed_length(length as u64), Some(sealed.len() as u64));
            assert_eq!(plain_length(sealed.len() as u64), Some(length as u64));
            let (opened, count) = open_in_steps(&sealed, &keys, NAME, step);
            assert!(opened == bytes && count == Ok(length as u64), "{length} in steps of {step}");
        }
    }
    let sealed = seal_in_steps(&plain(100), &keys, NAME, 1);
    assert_eq!(open_in_steps(&sealed, &keys, NAME, 1), (plain(100), Ok(100)));
    assert_eq!(sealed_length(u64::MAX), None);
    assert_eq!(plain_length(0), None);
    for length in [0, 1, FRAME_BYTES, FRAME_BYTES + 1, 5 * FRAME_BYTES] {
        let sealed = sealed_length(length as u64).unwrap();
        assert_eq!(plain_length(sealed), Some(length as u64));
        assert_ne!(plain_length(sealed - 1), Some(length as u64));
        assert_ne!(plain_length(sealed + 1), Some(length as u64));
    }
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let keys = keys();
    let sealed = seal(&plain(100), &keys);
    for index in 0..sealed.len() {
        for bit in 0..8 {
            let mut bad = sealed.clone();
            bad[index] ^= 1 << bit;
            assert!(open(&bad, &keys).is_err(), "bit {bit} of byte {index}");
        }
        assert!(open(&sealed[..index], &keys).is_err(), "cut to {index}");
    }
    let longer = [sealed.as_slice(), &[0]].concat();
    assert!(open(&longer, &keys).is_err());
    let twice = [sealed.as_slice(), &sealed].concat();
    assert!(open(&twice, &keys).is_err());
}

#[test]
fn frames_stay_where_they_are() {
    let keys = keys();
    // Frames of equal bytes differ once they are sealed.
    let whole = vec![7; 4 * FRAME_BYTES];
    let sealed = seal(&whole, &keys);
    let (header, frames) = sealed.split_at(HEADER_BYTES);
    let frames: Vec<&[u8]> = frames.chunks(SEALED_FRAME_BYTES).collect();
    assert_ne!(frames[0], frames[1]);
    let arranged = |order: &[usize]| {
        let parts = order.iter().map(|index| frames[*index]);
        let bytes: Vec<u8> = header.iter().chain(parts.flatten()).copied().collect();
        open(&bytes, &keys)
    };
    assert!(arranged(&[0, 1, 2, 3]).unwrap() == whole);
    let damaged = [
        &[1_usize, 0, 2, 3][..],
        &[0, 1, 3, 2],
        &[0, 1, 2],
        &[0, 1, 3],
        &[1, 2, 3],
        &[0, 1, 2, 3, 3],
        &[0, 0, 2, 3],
        &[3],
        &[],
    ];
    for order in damaged {
        assert!(arranged(order).is_err(), "{order:?}");
    }
    // Those of another object, of the same bytes under the same name.
    let other = seal(&whole, &keys);
    let border = HEADER_BYTES + 2 * SEALED_FRAME_BYTES;
    assert!(open(&[&sealed[..border], &other[border..]].concat(), &keys).is_err());
    assert!(open(&[&sealed[..HEADER_BYTES], &other[HEADER_BYTES..]].concat(), &keys).is_err());
}

/// What AWS-LC has sealed, which had the cipher before.
#[test]
fn what_another_implementation_has_sealed_is_opened() {
    const KEY: &str = "kvfs-remote-key 1\nkey 52f2114dab3edd75 \
        f048afcebcbe26626cabef4f5dc2455c95f6ab20b6e20b7dccf7582dad9e925b";
    const SEALED: &str = "6b7666737365616c0100000075dd3eab4d11f252a5b6bcb5523d56c124b54a6252d9e92c0b3553ee6282722082393a24\
        7dc1bce2ca2f26957054f1d9fdbc59fd6a39658b086439917274df40ee5e083f5de911527a03bb8fad44b32d103709e7\
        a19765bfeee162b0ef1e";
    let name = "blobs/a3/a34e4bcc1b6d673a52f7b926f1f76b8d7f25218a1817abe1c1fc122d083f7caa.raw";
    let ring: KeyRing = KEY.parse().unwrap();
    let keys = ring.subkeys(RemoteId(0x7967_914d_c1e1_0438_e4cc_c579_7c49_06e7)).into();
    let byte = |at: usize| u8::from_str_radix(&SEALED[at..at + 2], 16).unwrap();
    let sealed: Vec<u8> = (0..SEALED.len()).step_by(2).map(byte).collect();
    let (bytes, outcome) = open_in_steps(&sealed, &keys, name, 1000);
    assert_eq!((bytes.as_slice(), outcome), (b"hello\n".as_slice(), Ok(6)));
}

#[test]
fn another_name_or_another_key_opens_nothing() {
    let (ours, theirs) = (keys(), keys());
    let sealed = seal(&plain(1000), &ours);
    let (bytes, outcome) = open_in_steps(&sealed, &ours, "blobs/ab/ce.raw", 1 << 20);
    assert!(bytes.is_empty());
    assert_eq!(outcome, Err(Problem::Damaged("is not what was sealed under this name")));
    assert_eq!(open(&sealed, &theirs), Err(Problem::UnknownKey(ours[0].id)));
    // It says that it is under a key that we have.
    let mut forged = sealed;
    forged[12..20].copy_from_slice(&theirs[0].id.0.to_le_bytes());
    assert!(open(&forged, &theirs).is_err());
}

#[test]
fn what_was_never_sealed_is_told() {
    let keys = keys();
    let not_sealed = Problem::Damaged("is not a sealed object");
    assert_eq!(open(&plain(5000), &keys), Err(not_sealed));
    assert_eq!(open(&[], &keys), Err(Problem::Damaged("is cut off")));
    let mut later = seal(&[], &keys);
    later[8] = 2;
    assert_eq!(open(&later, &keys), Err(Problem::Version(2)));
}

#[test]
fn random_changes_pass_on_nothing_but_what_was_sealed() {
    let keys = keys();
    let whole = plain(2 * FRAME_BYTES + 5000);
    let sealed = seal(&whole, &keys);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % below as u64).unwrap()
    };
    for round in 0..200 {
        let mut bad = sealed.clone();
        for _ in 0..=random(3) {
            let (place, length) = (random(bad.len()), 1 + random(2000));
            let end = (place + length).min(bad.len());
            match random(4) {
                0 => bad[place] = bad[place].wrapping_add(1 + random(255).to_le_bytes()[0]),
                1 => drop(bad.drain(place..end)),
                2 => {
                    let part = bad[place..end].to_vec();
                    let target = random(bad.len());
                    bad.splice(target..target, part);
                }
                _ => bad.truncate(place.max(1)),
            }
        }
        if bad == sealed {
            continue;
        }
        let (bytes, outcome) = open_in_steps(&bad, &keys, NAME, 1 + random(400_000));
        assert!(outcome.is_err(), "round {round}");
        assert!(whole.starts_with(&bytes), "round {round}");
    }
}

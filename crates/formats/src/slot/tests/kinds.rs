//! Slots of models with more than one kind of layer.

use kvfs_page::{LayerKind, StateShape, StateTensor};

use super::*;
use crate::sequence_files;

const SLIDING: LayerKind = LayerKind::Sliding { window: 3 };
const CELLS: u32 = 7;
const IDS: [u32; 8] = [7, 8, 9, 10, 11, 12, 13, 14];

fn state() -> LayerKind {
    let tensor = |name: &str, elements| StateTensor {
        name: name.to_owned(),
        dtype: Dtype::F32,
        shape: vec![elements],
    };
    LayerKind::State(StateShape { state: vec![tensor("conv", 3), tensor("ssm", 2)] })
}

/// Layers of these kinds, of one head of 4 in f16: 8 bytes of K and of V for each token. Pages have two tokens.
fn manifest_of(kinds: &[LayerKind]) -> Manifest {
    let layers = u32::try_from(kinds.len()).unwrap();
    let fields = ManifestFields::new("m", Dtype::F16, layers, 1, 4);
    Manifest::new(ManifestFields { page_tokens: 2, layers: Some(kinds.to_vec()), ..fields })
        .unwrap()
}

fn with_windows() -> Manifest {
    manifest_of(&[SLIDING, LayerKind::Attention, SLIDING])
}

fn hybrid() -> Manifest {
    manifest_of(&[state(), LayerKind::Attention, state()])
}

fn recurrent() -> Manifest {
    manifest_of(&[state(), state()])
}

fn all_kinds() -> Manifest {
    manifest_of(&[state(), SLIDING, LayerKind::Attention, state()])
}

/// The byte that a tensor has at a place.
fn byte(layer: Layer, tensor: usize, token: u32, at: usize) -> u8 {
    (layer.0 as usize * 61 + tensor * 31 + token as usize * 9 + at) as u8
}

/// As the engine writes it.
fn file_of_kinds(manifest: &Manifest, version: Version) -> Vec<u8> {
    let format = Format::of_version(manifest, version).unwrap();
    let head = Head { version, tokens: &IDS, cells: CELLS, is_transposed: false, session: None };
    let mut file = Vec::new();
    for (number, cache) in format.caches().rows.iter().enumerate() {
        head.write_number(&mut file, &format, number).unwrap();
        for is_v in [false, true] {
            for layer in &cache.layers {
                write_tensor_head(&mut file, &format, is_v).unwrap();
                for token in cache.first(CELLS)..CELLS {
                    file.extend((0..8).map(|at| byte(*layer, usize::from(is_v), token, at)));
                }
            }
        }
    }
    if !format.caches().states.is_empty() {
        head.write_number(&mut file, &format, format.caches().rows.len()).unwrap();
        for (tensor, bytes) in [12, 8].into_iter().enumerate() {
            for (layer, shape) in &format.caches().states {
                write_state_head(&mut file, shape, tensor).unwrap();
                file.extend((0..bytes).map(|at| byte(*layer, tensor, 0, at)));
            }
        }
    }
    file
}

fn each(check: impl Fn(&Manifest, Version, &[u8])) {
    for manifest in [with_windows(), hybrid(), recurrent(), all_kinds()] {
        for version in Version::ALL {
            check(&manifest, version, &file_of_kinds(&manifest, version));
        }
    }
}

#[test]
fn what_was_written_of_each_kind_is_read() {
    each(|manifest, version, file| {
        let slot = open_for(manifest, file).unwrap();
        slot.check(manifest).unwrap();
        slot.check_form(version).unwrap();
        assert_eq!((slot.token_ids(), slot.num_tokens()), (&IDS[..], CELLS));
        for layer in (0..manifest.geometry().num_layers()).map(Layer) {
            let first = match manifest.layer_kind(layer).unwrap() {
                LayerKind::State(_) => {
                    let expected = (0..12).map(|at| byte(layer, 0, 0, at));
                    let expected = expected.chain((0..8).map(|at| byte(layer, 1, 0, at)));
                    let found = slot.read_state(layer).unwrap().unwrap();
                    assert_eq!(found, expected.collect::<Vec<u8>>());
                    continue;
                }
                LayerKind::Sliding { .. } => 4,
                _ => 0,
            };
            assert_eq!(slot.first_row(layer), first);
            let rows = (first..CELLS).flat_map(|token| {
                [0, 1]
                    .into_iter()
                    .flat_map(move |v| (0..8).map(move |at| byte(layer, v, token, at)))
            });
            let found = slot.read_rows(layer, first, CELLS - first).unwrap();
            assert_eq!(found, rows.collect::<Vec<u8>>());
        }
    });
}

#[test]
fn every_byte_of_each_kind_has_a_part() {
    each(|manifest, version, file| {
        let format = Format::of_version(manifest, version).unwrap();
        let layout = Layout::new(&format, version, 8, CELLS);
        assert_eq!(layout.length(), file.len() as u64);
        let head =
            Head { version, tokens: &IDS, cells: CELLS, is_transposed: false, session: None };
        for (offset, found) in (0_u64..).zip(file) {
            let (part, rest) = layout.part(offset).unwrap();
            let expected = match part {
                Part::Head { number, at } => {
                    let mut bytes = Vec::new();
                    head.write_number(&mut bytes, &format, number).unwrap();
                    bytes[at as usize]
                }
                Part::TensorHead { bytes, at } => bytes[at as usize],
                Part::Rows { layer, is_v, first, at } => {
                    byte(layer, usize::from(is_v), first + at as u32 / 8, at as usize % 8)
                }
                Part::State { layer, tensor, at } => byte(layer, tensor, 0, at as usize),
                Part::Checkpoints { .. } => panic!("{part:?}"),
            };
            assert_eq!(*found, expected, "{offset}: {part:?}");
            assert!(rest > 0 && layout.part(offset + rest).is_none_or(|(next, _)| next != part));
        }
        assert_eq!(layout.part(file.len() as u64), None);
    });
}

#[test]
fn every_cut_of_each_kind_is_refused() {
    each(|manifest, version, file| {
        for length in 0..file.len() {
            assert!(open_for(manifest, &file[..length]).is_err(), "{length} of {}", file.len());
            let beginning = tempfile::tempfile().unwrap();
            beginning.write_all_at(&file[..length], 0).unwrap();
            // What is there is right so far.
            assert_eq!(Slot::check_beginning(beginning, version, manifest), Ok(()), "{length}");
        }
        assert!(open_for(manifest, &[file, &[0]].concat()).is_err());
    });
}

/// Whatever one byte becomes, the file is refused, or all that it says it has can be read.
#[test]
fn a_changed_byte_is_refused_or_read() {
    each(|manifest, _, file| {
        let place = tempfile::tempfile().unwrap();
        place.write_all_at(file, 0).unwrap();
        for (at, byte) in (0_u64..).zip(file) {
            for changed in [1, byte ^ 0x80] {
                place.write_all_at(&[changed], at).unwrap();
                let slot = Slot::of(place.try_clone().unwrap(), manifest);
                if let Ok(slot) = slot.and_then(|slot| slot.check(manifest).map(|()| slot)) {
                    let has_rows = !slot.parts.is_empty();
                    assert!(!has_rows || slot.num_tokens() == CELLS, "byte {at}");
                    for file in sequence_files(&slot, manifest) {
                        assert!(!file.unwrap().bytes.is_empty(), "byte {at}");
                    }
                }
            }
            place.write_all_at(&[*byte], at).unwrap();
        }
    });
}

/// Pages, and what stands in their place where they are not whole.
#[test]
fn files_of_a_sequence() {
    let manifest = all_kinds();
    let check = |cells: u32, expected: &[(u32, &str, bool)]| {
        let format = Format::new(&manifest).unwrap();
        let slot = open_for(&manifest, &file_of_kinds(&manifest, Version::Three)).unwrap();
        assert_eq!(format.caches().count(), 3);
        let rows = Cut { slot: &slot, cells };
        let files = sequence_files(&rows, &manifest).map(Result::unwrap);
        let files: Vec<_> = files.map(|it| (it.layer.0, it.name, it.is_sealed)).collect();
        let files: Vec<_> =
            files.iter().map(|(layer, name, sealed)| (*layer, name.as_str(), *sealed)).collect();
        assert_eq!(files, expected);
    };
    check(
        7,
        &[
            (0, "state-0000007.safetensors", true),
            (1, "0000004.safetensors", true),
            (1, "0000006.tail", false),
            (2, "0000000.safetensors", true),
            (2, "0000002.safetensors", true),
            (2, "0000004.safetensors", true),
            (2, "0000006.tail", false),
            (3, "state-0000007.safetensors", true),
        ],
    );
    check(
        6,
        &[
            (0, "state-0000006.safetensors", true),
            (1, "window-0000005.rows", false),
            (2, "0000000.safetensors", true),
            (2, "0000002.safetensors", true),
            (2, "0000004.safetensors", true),
            (3, "state-0000006.safetensors", true),
        ],
    );
}

/// A slot that ends earlier, with a window of one token.
struct Cut<'a> {
    slot: &'a Slot,
    cells: u32,
}

impl Rows for Cut<'_> {
    fn token_ids(&self) -> &[u32] {
        self.slot.token_ids()
    }

    fn num_tokens(&self) -> u32 {
        self.cells
    }

    fn read_rows(&self, layer: Layer, first: u32, count: u32) -> io::Result<Vec<u8>> {
        self.slot.read_rows(layer, first, count)
    }

    fn first_row(&self, layer: Layer) -> u32 {
        if self.cells == CELLS {
            self.slot.first_row(layer)
        } else {
            self.slot.first_row(layer).min(1) * 5
        }
    }

    fn read_state(&self, layer: Layer) -> io::Result<Option<Vec<u8>>> {
        self.slot.read_state(layer)
    }
}

/// One number of a file is another.
#[test]
fn what_does_not_fit_is_one_line() {
    let check = |manifest: &Manifest, (offset, number): (usize, u32), line: &str| {
        let mut file = file_of_kinds(manifest, Version::Three);
        file[offset..offset + 4].copy_from_slice(&number.to_le_bytes());
        let slot = open_for(manifest, &file);
        let error = slot.and_then(|slot| slot.check(manifest)).unwrap_err();
        assert!(error.contains(line) && !error.contains('\n'), "{offset}: {error}");
    };
    // Magic, version, ids; streams, cells, cells of 12 bytes, V transposed, layers, then one layer of K and V.
    let first = 12 + 4 * 8 + 8 + 12 * 7;
    let second = first + 8 + 2 * (12 + 7 * 8);
    let windows = with_windows();
    check(&windows, (first + 4, 2), "has 2 layers, the manifest 1");
    check(&windows, (second + 8, 9), "cell 0 is at position 9");
    check(&windows, (second + 8 + 3 * 12 + 4, 3), "has 3 layers with a window, the manifest 2");
    check(&windows, (second + 8 + 3 * 12 + 12, 16), "ends at byte");
    let states = hybrid();
    check(&states, (second, 2), "says that it has 2 cells of recurrent layers");
    check(&states, (second + 4, 7), "has rows of 7 tokens, and states after 8");
    check(&states, (second + 4, u32::MAX), "has states after position -1");
    check(&states, (second + 8, 1), "has states of no one sequence");
    check(&states, (second + 12, 1), "states in another order");
    check(&states, (second + 16, 4), "has states of 4 layers, the manifest 3");
    check(&states, (second + 20, 1), "layer 0 has R of ggml type 1, the manifest's state 0");
    check(&states, (second + 24, u32::MAX), "ends at byte");
    // A window that is longer than the manifest's.
    let longer = manifest_of(&[
        LayerKind::Sliding { window: 4 },
        LayerKind::Attention,
        LayerKind::Sliding { window: 4 },
    ]);
    let file = file_of_kinds(&longer, Version::Three);
    let error = open_for(&windows, &file).unwrap_err();
    assert!(error.contains("has rows of positions 3 to 7 of layers with a window"), "{error}");
    // One that lacks its first row, or its last.
    for (position, cells) in [(5, 2), (4, 2)] {
        let numbers = [1, cells, position, 1, 0, position + 1, 1, 0].map(u32::to_le_bytes);
        let file = file_of_kinds(&windows, Version::Three);
        let file = [&file[..second], numbers.as_flattened(), &[0; 64]].concat();
        assert!(open_for(&windows, &file).is_err());
    }
    // A state of other elements.
    let fewer = manifest_of(&[state(), LayerKind::Attention, state()]);
    let mut file = file_of_kinds(&fewer, Version::Three);
    file[second + 24..second + 32].copy_from_slice(&16_u64.to_le_bytes());
    file.splice(second + 32..second + 32, [0; 4]);
    let slot = open_for(&fewer, &file).unwrap();
    let error = slot.check(&fewer).unwrap_err();
    assert!(error.contains("layer 0 has R of 16 bytes, the manifest's state 12"), "{error}");
}

#[test]
fn models_that_have_no_slots() {
    let check = |kinds: &[LayerKind], line: &str| {
        let error = Caches::of(&manifest_of(kinds)).unwrap_err();
        assert!(error.contains(line), "{error}");
    };
    check(&[SLIDING], "the manifest none");
    let other = LayerKind::Sliding { window: 4 };
    check(&[LayerKind::Attention, SLIDING, other], "the manifest of several");
    check(&[LayerKind::Recurrent], "does not say what they consist of");
    check(&[LayerKind::Cross], "kind cross");
    let side = kvfs_page::SideRows { name: "index_k".to_owned(), row_bytes: 4 };
    check(&[LayerKind::Attention, LayerKind::WithSide(side)], "the manifest has index_k");
}

/// A context that nobody has used.
#[test]
fn what_has_no_tokens_has_no_rows_or_states() {
    let numbers = |numbers: &[u32]| {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>()
    };
    let head = numbers(&[MAGIC, 3, 0]);
    let windows = [&head[..], &numbers(&[1, 0, 1, 0])].concat();
    let slot = open_for(&with_windows(), &windows).unwrap();
    assert_eq!(slot.num_tokens(), 0);
    assert_eq!(slot.check(&with_windows()), Err("has no tokens".to_owned()));
    let tensors = [0, 12, 0, 0, 12, 0, 0, 8, 0, 0, 8, 0];
    let states = [&head[..], &numbers(&[1, 0, 0, 0, 3]), &numbers(&tensors)].concat();
    assert_eq!(open_for(&hybrid(), &states).unwrap().num_tokens(), 0);
}

/// What a server of version 4 adds.
#[test]
fn checkpoints_are_kept_as_they_are() {
    let state = |bytes: &[u8]| [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat();
    let of = |after: u64, count: u32| {
        let head = [&b"SCKP"[..], &1_u32.to_le_bytes(), &count.to_le_bytes()].concat();
        let one = [after.to_le_bytes(), [0, 0, 0, 0, 6, 0, 0, 0]].concat();
        [head, one, state(&[5; 40]), state(&[]), state(&[6; 3])].concat()
    };
    for manifest in [with_windows(), hybrid(), recurrent()] {
        let file = file_of_kinds(&manifest, Version::Four);
        let checkpoints = of(6, 1);
        let whole = [&file[..], &checkpoints].concat();
        let slot = open_for(&manifest, &whole).unwrap();
        assert_eq!(slot.checkpoints_bytes(), checkpoints.len() as u64);
        let mut found = Vec::new();
        crate::copy_checkpoints(&slot, |at, bytes| -> io::Result<()> {
            assert_eq!(at, found.len() as u64);
            found.extend_from_slice(bytes);
            Ok(())
        })
        .unwrap();
        assert_eq!(found, checkpoints);
        let format = Format::of_version(&manifest, Version::Four).unwrap();
        let layout = Layout::new(&format, Version::Four, 8, CELLS);
        let layout = layout.with_checkpoints(checkpoints.len() as u64);
        assert_eq!(layout.length(), whole.len() as u64);
        let begin = file.len() as u64;
        assert_eq!(layout.part(begin + 3).unwrap().0, Part::Checkpoints { at: 3 });
        let kept = tempfile::tempfile().unwrap();
        kept.write_all_at(&checkpoints, 0).unwrap();
        assert_eq!(check_checkpoints(kept.try_clone().unwrap(), CELLS), Ok(()));
        assert!(check_checkpoints(tempfile::tempfile().unwrap(), CELLS).is_err());

        for length in file.len() + 1..whole.len() {
            assert!(open_for(&manifest, &whole[..length]).is_err(), "{length}");
        }
        let check = |rest: &[u8], line: &str| {
            let error = open_for(&manifest, &[&file[..], rest].concat()).unwrap_err();
            assert!(error.contains(line), "{error}");
        };
        check(&of(8, 1), "has a checkpoint after 8 tokens, and rows of 7");
        check(&of(u64::MAX, 1), "has a checkpoint after -1 tokens");
        check(&of(6, 2), "ends at byte");
        check(&of(6, 0), "more than the caches");
        check(&of(6, 2000), "has 2000 checkpoints");
        // No server that writes version 3 has them, nor one of a model that can go back anywhere.
        let older = [&file_of_kinds(&manifest, Version::Three)[..], &checkpoints].concat();
        assert!(open_for(&manifest, &older).unwrap_err().contains("more than the caches"));
    }
    let plain = [&super::file(Version::Four)[..], &of(1, 1)].concat();
    assert!(open(&plain).unwrap_err().contains("more than the caches"));
}

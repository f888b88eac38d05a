//! Side rows of pages and tails, through edits too, and tails that lack them.

use std::fs;
use std::path::PathBuf;

use crate::page::{
    Dtype, Layer, LayerKind, Manifest, ManifestFields, PagePlace, SideRows, TokenStart, names,
    pack_page,
};
use crate::reader::{Backend, Rates, ReadError, Sequence};
use crate::sequence::Sequences;

/// Of a token, behind 8 bytes of K and V: its number, and that of its layer.
const SIDE: usize = 5;

/// Pages of 4 tokens; both layers keep side rows of different length.
struct Sparse {
    directory: tempfile::TempDir,
    manifest: Manifest,
}

impl Sparse {
    /// Two pages, and a tail of three rows.
    fn new() -> Self {
        let mut fields = ManifestFields::new("sparse", Dtype::F16, 2, 1, 2);
        fields.page_tokens = 4;
        let kind =
            |row_bytes| LayerKind::WithSide(SideRows { name: "index_k".to_owned(), row_bytes });
        fields.layers = Some(vec![kind(5), kind(9)]);
        let manifest = Manifest::new(fields).unwrap();
        let sparse = Self { directory: tempfile::tempdir().unwrap(), manifest };
        fs::create_dir_all(sparse.sequence()).unwrap();
        fs::write(sparse.model().join(names::MANIFEST), sparse.manifest.to_json()).unwrap();
        let ids: Vec<u8> = (0..11_u32).flat_map(u32::to_le_bytes).collect();
        fs::write(sparse.sequence().join(names::TOKENS), ids).unwrap();
        for layer in [Layer(0), Layer(1)] {
            let directory = sparse.sequence().join(names::format_layer(layer));
            fs::create_dir(&directory).unwrap();
            for start in [0, 4] {
                let place = PagePlace::new(&sparse.manifest, layer, TokenStart(start)).unwrap();
                let page = pack_page(&place, &sparse.rows(layer, start, 4), 4).unwrap();
                fs::write(directory.join(names::format_page(TokenStart(start))), page).unwrap();
            }
            fs::write(sparse.tail(layer), sparse.rows(layer, 8, 3)).unwrap();
        }
        sparse
    }

    fn model(&self) -> PathBuf {
        self.directory.path().join("models/m")
    }

    fn sequence(&self) -> PathBuf {
        self.model().join("sequences/s")
    }

    fn tail(&self, layer: Layer) -> PathBuf {
        let directory = self.sequence().join(names::format_layer(layer));
        directory.join(names::format_tail(TokenStart(8)))
    }

    fn row(&self, layer: Layer, token: u64) -> Vec<u8> {
        let bytes = self.manifest.layer_geometry(layer).side_row_bytes();
        let mut row = vec![u8::try_from(layer.0).unwrap(); usize::try_from(bytes).unwrap()];
        row[0] = u8::try_from(token).unwrap();
        row
    }

    fn rows(&self, layer: Layer, start: u64, tokens: u64) -> Vec<u8> {
        let tokens = start..start + tokens;
        tokens.flat_map(|token| [vec![0xff; 8], self.row(layer, token)].concat()).collect()
    }

    fn open(&self) -> Sequence {
        Sequence::open(&self.sequence()).unwrap()
    }
}

/// Where a row stands, by how much it was moved, and the row.
type Placed = (u64, i64, Vec<u8>);

fn found(sequence: &Sequence, layer: Layer, end: u64) -> Vec<Placed> {
    let mut stream = sequence.stream_layers(&[layer], 0..end).unwrap();
    let mut found = Vec::new();
    while let Some(run) = stream.next_run().unwrap() {
        let (blocks, sides) = (run.blocks(), run.side_blocks());
        // They are of the same tokens as K and V.
        let of_blocks =
            blocks.iter().map(|block| (block.first_position, block.tokens, block.shift));
        let of_sides = sides.iter().map(|side| (side.first_position, side.tokens, side.shift));
        assert!(of_blocks.eq(of_sides));
        for side in sides {
            if let Some(rows) = side.contiguous() {
                assert!(rows.starts_with(side.row(0)) && rows.ends_with(side.row(side.tokens - 1)));
            }
            let position = |token| side.first_position + token as u64;
            found.extend(
                (0..side.tokens)
                    .map(|token| (position(token), side.shift, side.row(token).to_vec())),
            );
        }
    }
    found
}

#[test]
fn side_rows_of_pages_and_tails() {
    let sparse = Sparse::new();
    let sequence = sparse.open();
    assert_eq!(sequence.valid_tokens().unwrap(), 11);
    for layer in [Layer(0), Layer(1)] {
        for end in [11, 9, 6] {
            let expected: Vec<_> =
                (0..end).map(|token| (token, 0, sparse.row(layer, token))).collect();
            assert_eq!(found(&sequence, layer, end), expected);
        }
    }
    let threads = Backend::Cpu {
        instructions: crate::attention::InstructionSet::detect(),
        threads: 1,
        why: None,
    };
    let plan = sequence.plan(0..11, threads, &Rates::default()).unwrap();
    assert_eq!(plan.tail_bytes, 3 * (8 + 5) + 3 * (8 + 9));
    assert_eq!(sparse.row(Layer(0), 0).len(), SIDE);
}

#[test]
fn side_rows_go_with_their_tokens() {
    let sparse = Sparse::new();
    let sequences = Sequences::open(&sparse.model()).unwrap();
    // The beginning of another sequence ends in a page, whose first rows become a tail.
    sequences.seq_cp("s", "begin", ..6).unwrap();
    let begin = Sequence::open(&sparse.model().join("sequences/begin")).unwrap();
    for layer in [Layer(0), Layer(1)] {
        let expected: Vec<_> = (0..6).map(|token| (token, 0, sparse.row(layer, token))).collect();
        assert_eq!(found(&begin, layer, 6), expected);
    }
    // Tokens 2 to 4 go, and those behind move up.
    sequences.context_shift("s", 2..5, "before").unwrap();
    let sequence = sparse.open();
    for layer in [Layer(0), Layer(1)] {
        let stay = (0..2).map(|token| (token, 0, sparse.row(layer, token)));
        let moved = (5..11).map(|token| (token - 3, -3, sparse.row(layer, token)));
        assert_eq!(found(&sequence, layer, 11), stay.chain(moved).collect::<Vec<_>>());
    }
}

#[test]
fn a_tail_that_lacks_side_rows_has_no_tokens() {
    let sparse = Sparse::new();
    let whole = fs::read(sparse.tail(Layer(0))).unwrap();
    // K and V alone of three tokens, a row that was cut, a row too many by a byte.
    for bytes in [vec![0xff; 24], whole[..whole.len() - 1].to_vec(), [&whole[..], &[0]].concat()] {
        fs::write(sparse.tail(Layer(0)), &bytes).unwrap();
        let mut sequence = sparse.open();
        assert_eq!(sequence.layer_tokens(Layer(0)).unwrap(), 8, "{} bytes", bytes.len());
        assert_eq!(sequence.valid_tokens().unwrap(), 8);
        assert_eq!(found(&sequence, Layer(0), 8).len(), 8);
        let read = sequence.stream_layers(&[Layer(0)], 0..9).and_then(|mut stream| {
            while stream.next_run()?.is_some() {}
            Ok(())
        });
        assert!(matches!(read, Err(ReadError::Missing { layer: Layer(0), .. })), "{read:?}");
        // Whoever follows waits for the rest.
        fs::write(sparse.tail(Layer(0)), &whole).unwrap();
        let reached = sequence.wait_for(Layer(0), 11, std::time::Duration::ZERO).unwrap();
        assert_eq!(reached, 11);
    }
    // One that was whole when it was listed, and is not any more.
    let sequence = sparse.open();
    fs::write(sparse.tail(Layer(0)), &whole[..whole.len() - 1]).unwrap();
    let mut stream = sequence.stream_layers(&[Layer(0)], 0..11).unwrap();
    let outcome = loop {
        match stream.next_run() {
            Ok(Some(_)) => {}
            outcome => break outcome,
        }
    };
    assert!(matches!(outcome, Err(ReadError::Missing { layer: Layer(0), start: TokenStart(8) })));
}

#[test]
fn a_page_without_its_side_rows_is_none() {
    let sparse = Sparse::new();
    let page = sparse.sequence().join("000").join(names::format_page(TokenStart(0)));
    let other = sparse.sequence().join("001").join(names::format_page(TokenStart(0)));
    fs::copy(&other, &page).unwrap();
    let sequence = sparse.open();
    let mut stream = sequence.stream_layers(&[Layer(0)], 0..4).unwrap();
    let error = stream.next_run().unwrap_err();
    assert!(error.to_string().contains("tensor side has shape [4, 9]"), "{error}");
}

//! Against a list of cells, as llama.cpp keeps them.

use proptest::prelude::*;

use super::*;

/// `(row, position, position that K was rotated for)` of each token that is there.
type Cells = Vec<(u64, u64, u64)>;

fn cells(positions: &Positions, rows: u64) -> Cells {
    let runs = positions.within(0..rows).flat_map(|run| {
        (0..run.tokens).map(move |token| {
            let position = run.position + token;
            (run.row + token, position, position.checked_add_signed(-run.shift).unwrap())
        })
    });
    runs.collect()
}

#[derive(Debug, Clone)]
enum Step {
    Append(u64),
    Remove(Range<u64>),
    Add(Range<u64>, i64),
    Divide(Range<u64>, u64),
    Cut,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || {
        let bounds = (0_u64..40, 0_u64..40);
        prop_oneof![
            bounds.prop_map(|(a, b)| a.min(b)..a.max(b)),
            (0_u64..40).prop_map(|a| a..u64::MAX)
        ]
    };
    prop_oneof![
        3 => (1_u64..9).prop_map(Step::Append),
        2 => range().prop_map(Step::Remove),
        2 => (range(), -20_i64..20).prop_map(|(range, delta)| Step::Add(range, delta)),
        1 => (range(), 1_u64..5).prop_map(|(range, divisor)| Step::Divide(range, divisor)),
        1 => Just(Step::Cut),
    ]
}

proptest! {
    #[test]
    fn cells_stand_where_llama_cpp_has_them(steps in prop::collection::vec(step(), 1..20)) {
        let (mut found, mut rows, mut expected) = (Positions::default(), 0, Cells::new());
        for step in steps {
            let end = expected.iter().map(|cell| cell.1 + 1).max().unwrap_or(0);
            match step {
                Step::Append(tokens) => {
                    // An empty one begins at 0 again, which cutting its rows off sees to.
                    let at = found.within(rows..rows + 1).next().unwrap().position;
                    prop_assert!(at == end || expected.is_empty());
                    expected.extend((0..tokens).map(|token| (rows + token, at + token, at + token)));
                    rows += tokens;
                }
                Step::Remove(range) => {
                    found.remove(rows, range.clone());
                    expected.retain(|cell| !range.contains(&cell.1));
                }
                Step::Add(range, delta) => {
                    found.add(rows, range.clone(), delta).unwrap();
                    expected.retain(|cell| !range.contains(&cell.1) || cell.1.checked_add_signed(delta).is_some());
                    for cell in expected.iter_mut().filter(|cell| range.contains(&cell.1)) {
                        cell.1 = cell.1.strict_add_signed(delta);
                    }
                }
                Step::Divide(range, divisor) => {
                    found.divide(rows, range.clone(), divisor).unwrap();
                    for cell in expected.iter_mut().filter(|cell| range.contains(&cell.1)) {
                        cell.1 /= divisor;
                    }
                }
                Step::Cut => {
                    rows = found.end_row(rows);
                    prop_assert_eq!(rows, expected.last().map_or(0, |cell| cell.0 + 1));
                    found.truncate(rows);
                }
            }
            prop_assert_eq!(&cells(&found, rows), &expected);
            let ends = expected.iter().map(|cell| cell.1);
            prop_assert_eq!(found.ends(rows), ends.clone().min().zip(ends.max()));
            // What is found by its prefix stands where it was written, without a hole before it.
            let plain = found.prefix_rows().min(rows);
            let is_plain = |(row, cell): (u64, &(u64, u64, u64))| *cell == (row, row, row);
            prop_assert!((0..plain).zip(&expected).all(is_plain) && plain <= expected.len() as u64);
            let again = found.to_json().map_or(Positions::default(), |json| Positions::parse(json.as_bytes()).unwrap());
            prop_assert_eq!(cells(&again, rows + 3), cells(&found, rows + 3));
            prop_assert_eq!(again.prefix_rows().min(rows), plain);
        }
    }
}

#[test]
fn a_sequence_without_edits_needs_no_file() {
    let mut positions = Positions::default();
    assert!(positions.is_plain() && positions.to_json().is_none());
    assert_eq!(positions.prefix_rows(), u64::MAX);
    // The end alone, as when an answer is generated anew.
    positions.remove(100, 60..);
    assert_eq!(positions.end_row(100), 60);
    positions.truncate(60);
    assert!(positions.is_plain());
    // The middle, of which what was before is still found.
    positions.remove(80, 10..20);
    assert_eq!((positions.prefix_rows(), positions.edited_at()), (10, 80));
    let json = "{\"schema_version\":1,\"edited_at\":80,\"runs\":[[0,10,0,0],[20,60,20,0]],\"next\":[80,80]}\n";
    assert_eq!(positions.to_json().unwrap(), json);
    // Cutting off what was edited leaves what was not.
    positions.remove(90, 10..);
    positions.truncate(positions.end_row(90));
    assert_eq!(
        positions,
        Positions {
            runs: vec![Run { row: 0, tokens: 10, position: 0, shift: 0 }],
            next: (10, 10),
            edited_at: u64::MAX
        }
    );
    assert!(positions.is_plain());
}

#[test]
fn rows_that_were_computed_after_an_edit_are_not_found_again() {
    // The halves change places, a token is computed, and they change back.
    let mut positions = Positions::default();
    positions.add(10, 0..5, 100).unwrap();
    positions.add(10, 5..10, -5).unwrap();
    positions.add(10, 100..105, -95).unwrap();
    assert_eq!(positions.within(10..11).next().unwrap().position, 10);
    positions.add(11, 5..10, 100).unwrap();
    positions.add(11, 0..5, 5).unwrap();
    positions.add(11, 105..110, -105).unwrap();
    assert_eq!(cells(&positions, 11)[10], (10, 10, 10));
    assert_eq!(positions.prefix_rows(), 10);
    positions.truncate(11);
    assert_eq!(positions.prefix_rows(), 10);
}

#[test]
fn refused() {
    fn check(json: &str, expected: &str) {
        let error = Positions::parse(json.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let file = |runs: &str, next: &str| {
        format!("{{\"schema_version\":1,\"edited_at\":0,\"runs\":{runs},\"next\":{next}}}")
    };
    check("", "cannot be read");
    check("{\"schema_version\":2}", "2");
    check("{\"schema_version\":1}", "missing field");
    check(&file("[[0,0,0,0]]", "[1,1]"), "a run that cannot be");
    check(&file("[[0,5,0,0],[4,1,9,0]]", "[9,9]"), "a run that cannot be");
    check(&file("[[0,5,0,0]]", "[4,9]"), "a run that cannot be");
    check(&file("[[0,5,0,1]]", "[5,5]"), "a run that cannot be");
    check(&file("[[0,5,9007199254740990,0]]", "[5,5]"), "a run that cannot be");
    check(&file("[[18446744073709551615,5,0,0]]", "[5,5]"), "a run that cannot be");
    check(&file("[]", "[5,9007199254740992]"), "where none can");

    let mut positions = Positions::default();
    let error = positions.add(10, .., i64::MAX).unwrap_err();
    assert!(error.to_string().contains("cannot stand"), "{error}");
    assert!(positions.divide(10, .., 0).is_err());
    assert!(positions.divide(1 << 21, .., 2).is_err());
    assert!(positions.is_plain());
}

#[test]
fn removing_what_is_not_there_is_no_edit() {
    for range in [10..20, 10..u64::MAX, 4..4] {
        let mut positions = Positions::default();
        positions.remove(10, range.clone());
        assert!(positions.is_plain(), "{range:?}");
    }
    let mut positions = Positions::default();
    positions.remove(10, 9..20);
    assert_eq!((positions.is_plain(), positions.edited_at()), (false, 10));
}

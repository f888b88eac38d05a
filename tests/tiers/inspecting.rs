//! `kvfs inspect` of what has several places: what each tier has of it, without fetching any.

use kvfs::sequence::Sequences;
use serde_json::{Value, json};

use crate::common::{Mode, Model};
use crate::place::{Place, kvfs, printed, tier};
use crate::statements::write_sequence;

in_both_modes!(tiers_and_shared_bytes_add_up);

fn tiers_and_shared_bytes_add_up(mode: Mode) {
    let place = Place::new(mode, &[]);
    let model = Model::small();
    model.install(&place.mount);
    let pages = write_sequence(&place.mount, &model, 2);
    let sequences = Sequences::open(&model.directory(&place.mount)).unwrap();
    sequences.seq_cp("a", "b", ..u64::from(model.page_tokens())).unwrap();
    printed(&kvfs(&["sync"], &[place.mount.path()]));
    // The second page of the first layer, which only one sequence has.
    printed(&kvfs(&["evict"], &[&pages[1]]));
    let inspected = |path: &std::path::Path| -> Value {
        serde_json::from_str(&printed(&kvfs(&["inspect", "--json"], &[path]))).unwrap()
    };
    let page_bytes = pages[0].metadata().unwrap().len();
    let found = inspected(&model.sequence(&place.mount, "a"));
    assert_eq!(found["ssd"], json!({ "files": 3, "bytes": 3 * page_bytes }), "{found:#}");
    assert_eq!(found["remote"], json!({ "files": 1, "bytes": page_bytes }));
    assert_eq!(found["shared_bytes"], json!(2 * page_bytes), "the first page of each layer");
    assert_eq!(found["own_bytes"], json!(2 * page_bytes));
    assert!(found["used_unix_seconds"].as_u64().unwrap() > 1_700_000_000, "{found:#}");
    // Of the model each name counts.
    let all = inspected(&model.directory(&place.mount));
    assert_eq!(all["shared_bytes"], json!(4 * page_bytes), "{all:#}");
    let text = printed(&kvfs(&["inspect"], &[&model.sequence(&place.mount, "a")]));
    assert!(text.contains("\nremote: 1 file, ") && text.contains("\nown_bytes: "), "{text}");

    let page = inspected(&pages[1]);
    let ids: Vec<u8> = (0..2 * model.page_tokens()).flat_map(u32::to_le_bytes).collect();
    let prefix = model.manifest.prefix_of(&ids).unwrap().to_string();
    assert_eq!(page["prefix"], json!(prefix), "{page:#}");
    assert_eq!(tier(&pages[1]), "remote", "it was not fetched");
    assert_eq!(place.mount.metric("kvfs_moves_total{from=\"remote\",to=\"ssd\"}"), 0);
}

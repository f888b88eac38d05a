//! `kvfs status --plan`: where the bytes would come from.

use serde_json::{Value, json};

use crate::common::sys::write_and_close;
use crate::common::{Mode, Model};
use crate::place::{Place, kvfs, printed};

in_both_modes!(a_plan_adds_up);

fn a_plan_adds_up(mode: Mode) {
    let place = Place::new(mode, &["--cold", "zstd"]);
    let model = Model::small();
    model.install(&place.mount);
    let pages: Vec<_> = [0, 32, 64]
        .map(|start| {
            let path = model.page_path(&place.mount, "a", 0, start);
            write_and_close(&path, &model.page(0, start, start)).unwrap();
            path
        })
        .into();
    let sequence = model.sequence(&place.mount, "a");
    let plan =
        |words: &[&str]| printed(&kvfs(&[&["status"], words, &["--plan"]].concat(), &[&sequence]));
    let text = plan(&[]);
    assert!(text.contains("ssd: 3 files, 24.0 KiB"), "{text}");
    assert!(text.ends_with("without the remote: everything can be read\n"), "{text}");
    printed(&kvfs(&["evict"], &[&pages[1]]));
    let text = plan(&[]);
    assert!(text.contains("the first is 000/0000032.safetensors"), "{text}");
    let plan: Value = serde_json::from_str(&plan(&["--json"])).unwrap();
    let first = pages[1].to_str().unwrap();
    assert_eq!(plan["without_remote"], json!({ "unreadable_files": 1, "first": first }));
    assert_eq!(plan["remote_state"], "up");
    let bytes: u64 =
        plan["links"].as_array().unwrap().iter().map(|l| l["bytes"].as_u64().unwrap()).sum();
    assert_eq!(bytes, 3 * 8192);
    let remote = &plan["links"][3];
    assert_eq!((&remote["from"], &remote["files"]), (&json!("remote"), &json!(1)));
    assert!(remote["moved_bytes"].as_u64().unwrap() < 2 * 8192);
    assert_eq!(plan["files"][1]["tier"], "remote");
    let outside = kvfs(&["status", "--plan"], &[std::path::Path::new("/")]);
    assert!(crate::place::complaint(&outside).contains("is not in a mount of kvfs"));
}

//! `kvfs what-if`: what is told of another budget, against a mount with that budget in which the same is done.

use std::path::Path;

use serde_json::Value;

use crate::common::sys::{getxattr, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, fill};
use crate::place::{complaint, kvfs, printed};

in_both_modes!(what_is_told_of_memory_is_what_another_budget_finds);

const PAGES: u64 = 48;
/// What the policy finds may differ by so much, of all opens: copies that are open or not yet on the disk cannot leave.
const ERROR_MAX: f64 = 0.05;

/// A page file is 256 KiB + 4 KiB.
fn model() -> Model {
    Model::with(|fields| {
        fields.head_dim = 64;
        fields.num_kv_heads = 8;
        fields.page_tokens = 128;
    })
}

/// Pages come to be one by one, and between them are read: mostly some of the last, now and then any. Returns how many
/// opens there were, and how many found their page in memory.
fn work(mount: &Mount) -> (u64, u64) {
    let model = model();
    model.install(mount);
    let path = |page: u64| model.page_path(mount, "chat", 0, page * 128);
    let (mut opens, mut found) = (0, 0);
    let draws = fill(17, 4096);
    let mut draws = draws.chunks_exact(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(pair[1]));
    for page in 0..PAGES {
        let temporary = path(page).with_extension("tmp");
        write_and_close(&temporary, &model.page(0, page * 128, page)).unwrap();
        rename(&temporary, path(page)).unwrap();
        sync_directory(mount.path()).unwrap();
        for _ in 0..12 {
            let draw = draws.next().unwrap();
            let back = if draw % 3 == 0 { draw / 3 } else { draw % 16 };
            let path = path(page - back % (page + 1));
            opens += 1;
            found += u64::from(getxattr(&path, "user.kvfs.tier").unwrap() == "ram");
            std::fs::read(&path).unwrap();
        }
    }
    (opens, found)
}

fn ask(mount: &Mount, asked: &str) -> Value {
    let told = printed(&kvfs(&["what-if", "--json", "--ram", asked], &[mount.path()]));
    serde_json::from_str(&told).unwrap()
}

fn share(figures: &Value) -> f64 {
    figures["found_share"].as_f64().unwrap()
}

fn what_is_told_of_memory_is_what_another_budget_finds(mode: Mode) {
    let [mut told, mut counted] = [Vec::new(), Vec::new()];
    for (budget, other) in [("4M", "9M"), ("9M", "4M")] {
        let mount = Mount::with_options(mode, &["--ram", budget, "--commit-interval", "3600"]);
        let (opens, found) = work(&mount);
        let answer = ask(&mount, other);
        assert_eq!((&answer["uses"], &answer["one_file_in"]), (&opens.into(), &1.into()));
        let memory = &answer["tiers"][0];
        assert_eq!(memory["tier"], "ram");
        assert_eq!(memory["counted"]["found"], found, "{answer}");
        let present = share(&memory["counted"]);
        assert!((share(&memory["modelled"]) - present).abs() < ERROR_MAX, "{answer}");
        let rows = memory["budgets"].as_array().unwrap();
        let asked = rows.iter().find(|row| row["is_asked"] == true).unwrap();
        // Of two layers there are pages of one.
        let tokens = asked["tokens_found"].as_u64().unwrap();
        assert_eq!(tokens, asked["found"].as_u64().unwrap() * 128);
        told.push(share(asked));
        counted.push(present);
        check_words(&mount);
    }
    told.reverse();
    eprintln!("counted with each budget {counted:?}, told with the other one {told:?}");
    assert!(counted[1] > counted[0] + 0.1, "the budgets make no difference: {counted:?}");
    for (told, counted) in told.iter().zip(&counted) {
        assert!((told - counted).abs() < ERROR_MAX, "{told} was told, {counted} is so");
    }
}

fn check_words(mount: &Mount) {
    let text = printed(&kvfs(&["what-if", "--disk-rate", "1G", "--ram", "7M"], &[mount.path()]));
    assert!(text.contains("since it was mounted: 576 opens in "), "{text}");
    assert!(text.contains(" (now) ") && text.contains("7.0 MiB (asked) "), "{text}");
    assert!(text.contains("\nDisk: the mount has no remote"), "{text}");
    let outside = complaint(&kvfs(&["what-if"], &[Path::new("/")]));
    assert!(outside.contains("is not in a mount of kvfs"), "{outside}");
    let below = printed(&kvfs(&["what-if", "--ram", "7M"], &[&mount.join("models")]));
    assert!(below.contains("since it was mounted: 576 opens in "), "{below}");
    for (wrong, why) in [("0", "--disk-rate is more than 0"), ("fast", "\"fast\" is no size")] {
        let output = kvfs(&["what-if", "--disk-rate", wrong], &[mount.path()]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && text.contains(why), "{text}");
    }
}

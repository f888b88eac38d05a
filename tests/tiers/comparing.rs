//! `kvfs diff` and `kvfs inspect --heat` where pages are elsewhere: what is said without their bytes, and that
//! nothing comes here unless it is asked for.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::sys::write_and_close;
use crate::common::{Mode, Model, forks};
use crate::place::{Place, complaint, kvfs, printed, tier};
use crate::statements::write_sequence;

in_both_modes!(nothing_comes_here_to_be_compared, a_picture_brings_nothing_here);

fn nothing_comes_here_to_be_compared(mode: Mode) {
    let place = Place::new(mode, &[]);
    let models = [
        Model::small(),
        Model::with(|fields| fields.tenant = Some("other".to_owned())).named("other"),
    ];
    let [pages, others] = models.each_ref().map(|model| {
        model.install(&place.mount);
        write_sequence(&place.mount, model, 1)
    });
    let [model, _] = &models;
    for layer in 0..2 {
        // Layer 0 is stored once, layer 1 has other bytes.
        let page = model.page(layer, 0, 1 + u64::from(layer));
        write_and_close(model.page_path(&place.mount, "b", layer, 0), &page).unwrap();
    }
    let tokens = std::fs::read(model.tokens_path(&place.mount, "a")).unwrap();
    std::fs::write(model.tokens_path(&place.mount, "b"), tokens).unwrap();
    let [a, b] = ["a", "b"].map(|name| model.sequence(&place.mount, name));
    printed(&kvfs(&["evict"], &[&a, &b, &others[0], &others[1]]));
    let are_away = || pages.iter().chain(&others).all(|page| tier(page) == "remote");
    assert!(are_away());
    let diff = |words: &[&str], paths: [&Path; 2]| {
        let output = kvfs(&[&["diff", "--json"], words].concat(), &paths);
        let found = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (output.status.code(), found)
    };
    // Checksums of the same model tell pages apart.
    let (code, found) = diff(&[], [&a, &b]);
    assert_eq!((code, &found["result"]), (Some(1), &json!("different")));
    let found = &found["pages"];
    assert_eq!((&found["shared"], &found["different"]), (&json!(1), &json!(1)), "{found}");
    // Those of two models say nothing.
    let other = models[1].sequence(&place.mount, "a");
    let (code, found) = diff(&[], [&a, &other]);
    assert_eq!((code, &found["pages"]["not_compared"]), (Some(2), &json!(2)), "{found:#}");
    let why = found["not_compared_because"].as_str().unwrap();
    assert!(why.contains("its bytes are not here"), "{why}");
    let (code, found) = diff(&[], [&pages[0], &others[0]]);
    assert_eq!((code, found), (Some(2), Value::Null));
    assert!(are_away(), "nothing was fetched");
    let (code, found) = diff(&["--fetch"], [&a, &other]);
    assert_eq!((code, &found["pages"]["identical"]), (Some(0), &json!(2)), "{found:#}");
    assert!(pages.iter().chain(&others).all(|page| tier(page) == "ssd"));
    // Equal, which nobody can be told.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let mut child = forks::spawn(command.arg("diff").args([&a, &a]).stdout(full)).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(2));
}

fn a_picture_brings_nothing_here(mode: Mode) {
    let place = Place::new(mode, &[]);
    let model = Model::small();
    model.install(&place.mount);
    let page = write_sequence(&place.mount, &model, 1).remove(0);
    printed(&kvfs(&["evict"], &[&page]));
    let picture = place.mount.files("page.png");
    let draw = || kvfs(&["inspect", "--heat"], &[&picture, &page]);
    let said = complaint(&draw());
    assert!(said.contains("its bytes are not here as they are read"), "{said}");
    assert_eq!(tier(&page), "remote");
    assert!(!picture.exists());
    printed(&kvfs(&["promote"], &[&page]));
    let said = printed(&draw());
    assert!(said.contains("verified: ") && said.contains("q8_0 error"), "{said}");
    assert!(std::fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
}

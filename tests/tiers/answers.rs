//! What commands answer to programs: one JSON object each, and of an error one line on standard error.

use std::path::Path;

use serde_json::{Value, json};

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Model};
use crate::place::{Place, complaint, kvfs, printed};
use crate::statements::write_sequence;

in_both_modes!(
    commands_on_a_mount_answer_in_json,
    sequences_are_converted_and_cleared_in_json,
    a_mount_and_its_end_are_told_in_json,
);

#[track_caller]
fn told(words: &[&str], paths: &[&Path]) -> Value {
    serde_json::from_str(&printed(&kvfs(words, paths))).unwrap()
}

fn commands_on_a_mount_answer_in_json(mode: Mode) {
    let place = Place::new(mode, &[]);
    place.write("f", 2);
    let mount = place.mount.path();
    let synced = told(&["sync", "--json"], &[mount]);
    assert_eq!(synced, json!({ "mountpoint": mount, "durable": true, "remote": null }));
    let synced = told(&["sync", "--remote", "--json"], &[mount]);
    let remote = &synced["remote"];
    assert_eq!((&remote["complete"], &remote["state"]), (&json!(true), &json!("up")), "{synced:#}");
    assert_eq!((&remote["waiting_files"], &remote["given_up_files"]), (&json!(0), &json!(0)));

    let collected = told(&["gc", "--dry-run", "--json"], &[mount]);
    assert_eq!((&collected["dry_run"], &collected["remote"]["stores"]), (&json!(true), &json!(1)));
    assert_eq!(collected["remote"]["deleted_objects"], json!(0), "{collected:#}");
    let collected = told(&["gc", "--yes", "--json"], &[mount]);
    assert_eq!(
        (&collected["dry_run"], &collected["remote"]["complete"]),
        (&json!(false), &json!(true))
    );

    let scrubbed = told(&["scrub", "--json"], &[mount]);
    assert_eq!((&scrubbed["state"], &scrubbed["damaged_files"]), (&json!("done"), &json!(0)));
    assert!(scrubbed["read_bytes"].as_u64().unwrap() >= 8 << 20, "{scrubbed:#}");
    let changed = told(&["config", "set", "--json", "verify=always"], &[mount]);
    assert_eq!(changed, json!({ "mountpoint": mount, "set": { "verify": "always" } }));

    let refused = kvfs(&["gc", "--yes", "--json"], &[Path::new("/")]);
    assert!(refused.stdout.is_empty());
    assert_eq!(complaint(&refused).lines().count(), 1);
}

fn sequences_are_converted_and_cleared_in_json(mode: Mode) {
    let place = Place::new(mode, &[]);
    let model = Model::small();
    model.install(&place.mount);
    write_sequence(&place.mount, &model, 2);
    let tokens = json!(2 * model.page_tokens());
    let (from, to) = (model.sequence(&place.mount, "a"), model.sequence(&place.mount, "b"));
    let file = place.mount.beside("chat.safetensors");
    let exported = told(&["export", "--json"], &[&from, &file]);
    let bytes = file.metadata().unwrap().len();
    let expected = json!({ "sequence": from, "file": file, "tokens": tokens, "bytes": bytes });
    assert_eq!(exported, expected);
    let imported = told(&["import", "--json"], &[&file, &to]);
    assert_eq!((&imported["sequence"], &imported["tokens"]), (&json!(to), &tokens));
    let directory = model.directory(&place.mount);
    let clear = |word: &str| told(&["seq", "clear", word, "--json", "--all"], &[&directory]);
    let (would, did) = (clear("--dry-run"), clear("--yes"));
    assert_eq!((&would["dry_run"], &would["deleted_sequences"]), (&json!(true), &json!(2)));
    assert_eq!((&did["dry_run"], &did["deleted_bytes"]), (&json!(false), &would["deleted_bytes"]));
}

fn a_mount_and_its_end_are_told_in_json(_: Mode) {
    let directory = scratch_directory();
    let [store, mountpoint, log] = ["store", "mnt", "log"].map(|name| directory.path().join(name));
    std::fs::create_dir(&mountpoint).unwrap();
    let mounted = told(&["mount", "--json", "--log"], &[&log, &store, &mountpoint]);
    let named = json!([store, mountpoint, log]);
    assert_eq!(json!([mounted["store"], mounted["mountpoint"], mounted["log"]]), named);
    assert!(mounted["pid"].as_u64().unwrap() > 0, "{mounted:#}");
    let ended = told(&["umount", "--json"], &[&mountpoint]);
    assert_eq!(ended, json!({ "store": store, "mountpoint": mountpoint }));
}

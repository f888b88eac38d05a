//! Would the checks notice if a step were missing? A disk that leaves it out stands for a store that
//! does: some state must be wrong.

use crate::driver::WentWrong;
use crate::lie::Lie;
use crate::mounted::Berth;
use crate::power::{cut_everywhere, record, seed};
use crate::workloads::{ALL, Workload};

fn workload(name: &str) -> Workload {
    *ALL.iter().find(|workload| workload.name == name).unwrap()
}

fn check(lie: Lie, name: &str) {
    let berth = Berth::new();
    let workload = workload(name);
    let recording = record(&berth, &workload, &WentWrong { fault: None, lie: Some(lie) });
    let outcome = cut_everywhere(&recording, 400, seed());
    let why = outcome.expect_err(&format!("{lie:?} is not noticed in {name}"));
    println!("{lie:?}, {name}: {}", why.lines().next().unwrap_or_default());
}

#[test]
fn a_sync_that_is_left_out_is_noticed() {
    check(Lie::Objects, "files");
    check(Lie::Objects, "pages-in-memory");
    check(Lie::Shards, "pages");
    check(Lie::Database, "files");
    check(Lie::Store, "files");
    check(Lie::Encoded, "encoding");
}

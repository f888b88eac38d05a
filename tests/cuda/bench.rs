//! What runs on a borrowed machine with a GPU has run before, all of it, on the driver without one.

use std::path::Path;
use std::process::{Command, Output};

use crate::fake::{ELEMENTS, ModuleName, place_of_driver};

fn script(output: &Path, driver: Option<&Path>, path: Option<&Path>) -> (Output, String) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut script = Command::new(root.join("tests/gpu.sh"));
    script.arg("run").arg(env!("CARGO_BIN_EXE_kvfs")).arg(output).args(["--quick", "--plain"]);
    if let Some(driver) = driver {
        script.env("LD_LIBRARY_PATH", driver).env("KVFS_FAKE_MODULES", driver);
    }
    if let Some(path) = path {
        let all = std::env::var("PATH").unwrap();
        script.env("PATH", format!("{}:{all}", path.display()));
    }
    let output = script.output().unwrap();
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    (output, said)
}

#[test]
fn without_a_gpu_it_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let (output, said) = script(directory.path(), None, None);
    assert!(output.status.success(), "{said}");
    let has_gpu = Path::new("/dev/nvidiactl").exists();
    assert!(has_gpu || said.contains("gpu.sh: skipped: no GPU: cuda: no NVIDIA driver"), "{said}");
}

#[test]
fn with_every_kernel() {
    let modules: Vec<ModuleName<'_>> = ELEMENTS
        .iter()
        .flat_map(|(element, dtype)| [64, 128, 256].map(|width| (*element, *dtype, width)))
        .collect();
    let Some(driver) = place_of_driver(&modules) else { return };
    let directory = tempfile::tempdir().unwrap();
    // It is another program on a machine that has one: here it says what it was asked for.
    let tools = directory.path().join("tools");
    std::fs::create_dir(&tools).unwrap();
    let sanitizer = tools.join("compute-sanitizer");
    std::fs::write(&sanitizer, "#!/bin/sh\necho \"$@\" >>\"$0.log\"\n").unwrap();
    let executable: std::fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&sanitizer, executable).unwrap();
    let results = directory.path().join("results");
    let (output, said) = script(&results, Some(&driver), Some(&tools));
    assert!(output.status.success(), "{said}");
    for tool in ["memcheck", "racecheck"] {
        assert!(said.contains(&format!("gpu.sh: {tool} found nothing")), "{said}");
    }
    let asked = std::fs::read_to_string(tools.join("compute-sanitizer.log")).unwrap();
    for tool in ["memcheck", "racecheck"] {
        assert!(asked.contains(&format!("--tool {tool} --error-exitcode 9 ")), "{asked}");
    }
    assert!(asked.contains(" bench attention --cuda --quick --plain --json"), "{asked}");
    let json = std::fs::read_to_string(results.join("gpu.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["machine"]["pages"], "a plain directory");
    let figures = json["figures"].as_array().unwrap();
    let figure = |name: &str| figures.iter().find(|figure| figure["name"] == name);
    for what in ELEMENTS.map(|(_, dtype)| dtype).into_iter().chain(["options", "scans"]) {
        let error = figure(&format!("cuda_relative_l2_{what}")).unwrap()["value"].as_f64();
        assert!(error.unwrap() < 1e-5, "{what}: {error:?}");
    }
    assert!(figure("cuda_mass").unwrap()["value"].as_f64().unwrap() < 1e-5);
    assert_eq!(figure("cuda_pages_selected_otherwise").unwrap()["value"], 0.0);
    for name in [
        "cuda_ring_filling",
        "cuda_link",
        "cuda_memory",
        "cuda_cold_8k_tokens",
        "cuda_cold_streaming",
        "cuda_hybrid",
        "cuda_hot",
    ] {
        assert!(figure(name).is_some(), "no {name}");
    }
    let markdown = std::fs::read_to_string(results.join("gpu.md")).unwrap();
    assert!(markdown.contains("| `cuda_hot` |"), "{markdown}");
}

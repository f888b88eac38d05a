//! `manifest.json`.

use kvfs::page::{
    Dtype, Layer, Manifest, ManifestFields, PagePlace, PrefixHash, StatePlace, TokenStart,
    pack_state,
};

use super::engine::{Outcome, Target};

fn seeds() -> Vec<Vec<u8>> {
    let with = |change: fn(&mut ManifestFields)| {
        let mut fields = ManifestFields::new("test/fuzz", Dtype::F16, 2, 2, 64);
        change(&mut fields);
        Manifest::new(fields).unwrap().to_json().into_bytes()
    };
    let all: &[u8] = br#"{"schema_version":1,"model_id":"m","model_revision":"r","engine":"e",
"dtype":"q8_0","num_layers":3,"layers":["attention",{"sliding":{"window":4096}},"recurrent"],
"num_kv_heads":8,"head_dim":128,"v_head_dim":64,"page_tokens":256,"layout":"nhd","kv_rotation":"h",
"rope":{"theta":500000.0,"scaling":{"factor":8.0},"dims":64,"x":1},"tenant":"t","salt":"s",
"lora":"l","shard":{"rank":1,"size":4},"cold_encoding":"q4_0","unknown":[null,true]}"#;
    let states: &[u8] = br#"{"schema_version":1,"model_id":"m","dtype":"bf16","num_layers":3,
"layers":["attention",{"sliding":{"window":7}},{"recurrent":{"state":[{"name":"conv","dtype":"bf16",
"shape":[64,3]},{"name":"ssm","dtype":"f32","shape":[2,16,16]}]}}],"num_kv_heads":1,"head_dim":64}"#;
    let tenant = with(|fields| fields.tenant = Some("a".to_owned()));
    vec![with(|_| {}), tenant, all.to_vec(), states.to_vec()]
}

pub(crate) fn target() -> Target {
    Target {
        name: "manifest",
        length_max: 4096,
        seeds: seeds(),
        words: &[
            b"\"f16\"",
            b"\"q4_0\"",
            b"\"f8_e4m3\"",
            b"\"hnd\"",
            b"null",
            b"\"recurrent\"",
            b"{\"recurrent\":",
            b"{\"state\":[",
            b"\"shape\":[",
            b"\"tenant\":",
            b"\"salt\":",
            b"1e400",
            b"NaN",
            b"-1",
            b"4294967296",
            b"[[[[[[[[[[[[[[[[",
            b"{\"a\":{\"a\":{\"a\":",
            b"\\ud83d",
        ],
        allocation_max: 1 << 20,
        run: Box::new(|input| match Manifest::parse(input) {
            Err(error) => Outcome::refused(&error),
            Ok(manifest) => {
                check_accepted(&manifest);
                let geometry = manifest.geometry();
                let shape = (geometry.dtype().name(), geometry.layout().name());
                let fields = manifest.fields();
                let says = [&fields.tenant, &fields.salt, &fields.lora, &fields.engine];
                Outcome::accepted((shape, says.map(Option::is_some)))
            }
        }),
    }
}

/// It says the same when it is written and read again, and no place in it overflows anything.
fn check_accepted(manifest: &Manifest) {
    let again = Manifest::parse(manifest.to_json().as_bytes()).unwrap();
    assert_eq!(again.identity(), manifest.identity());
    assert!(again.same_cache(manifest));
    assert_eq!(again.prefix_root(), manifest.prefix_root());
    let geometry = manifest.geometry();
    for tokens in [1, geometry.page_tokens()] {
        let file_bytes = geometry.file_bytes(tokens);
        assert!(file_bytes <= kvfs::page::limits::MAX_FILE_BYTES);
        assert_eq!(file_bytes % 4096, 0);
    }
    let last = geometry.num_layers() - 1;
    for layer in [0, last, last + 1, u32::MAX] {
        for start in [0, 1, u64::from(geometry.page_tokens()), u64::MAX] {
            let place = PagePlace::new(manifest, Layer(layer), TokenStart(start));
            assert!(place.is_err() || layer <= last);
            if let Ok(place) = StatePlace::new(manifest, Layer(layer), TokenStart(start)) {
                assert!(PagePlace::new(manifest, Layer(layer), TokenStart(0)).is_err());
                check_state(&place);
            }
        }
    }
}

/// A state that is as the manifest says is accepted, and is a file of the format.
fn check_state(place: &StatePlace) {
    let bytes = place.shape().payload_bytes();
    let file_bytes = place.shape().file_bytes();
    assert!(file_bytes <= kvfs::page::limits::MAX_FILE_BYTES && file_bytes.is_multiple_of(4096));
    // Larger ones would take the time of the others.
    if let Some(bytes) = usize::try_from(bytes).ok().filter(|bytes| *bytes <= 64 << 10) {
        let prefix = PrefixHash([1; 32]);
        let file = pack_state(place, prefix, &vec![1; bytes]).unwrap();
        assert_eq!(place.verify_bytes(&file).unwrap().header.prefix, prefix);
        let read = safetensors::SafeTensors::deserialize(&file).unwrap();
        for tensor in &place.shape().state {
            let found = read.tensor(&tensor.name).unwrap();
            assert_eq!(found.data().len() as u64, tensor.bytes().unwrap());
        }
    }
}

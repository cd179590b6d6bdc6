import Foundation
import MLX
import MLXLMCommon

private let fileFormat = "mlx-h2o prompt cache"
private let fileVersion = "1"

extension H2OKVCache {
    /// Write a model's caches, evicted or not, with positions, scores, policy and remainder.
    ///
    /// The file is the one that Python's `mlx_h2o.save_prompt_cache` writes: either reads the other's.
    /// `savePromptCache` and `ChatSession.saveCache` of mlx-swift-lm cannot write these caches.
    ///
    /// - Parameters:
    ///   - caches: ``H2OKVCache`` and plain `KVCacheSimple` entries.
    ///   - url: A `.safetensors` file.
    ///   - metadata: Strings to keep with them.
    /// - Throws: ``H2OError/file(_:)`` for a cache of another kind, or the system's error.
    public static func saveCaches(
        _ caches: [any KVCache], to url: URL, metadata: [String: String] = [:]
    ) throws {
        var arrays: [String: MLXArray] = [:]
        let entries = try caches.enumerated().map { i, cache in
            switch cache {
            case let cache as H2OKVCache:
                let saved = try cache.saved()
                for (name, array) in saved.arrays { arrays["\(i).\(name)"] = array }
                return H2OSettingValue.object([
                    "class": .string("H2OKVCache"),
                    "config": try H2OSettingValue(parsing: saved.settings),
                ])
            case let cache as KVCacheSimple where type(of: cache) == KVCacheSimple.self:
                // mlx-lm's keys, values and offset, by their places in its state.
                let rows = cache.state
                for (j, array) in rows.enumerated() { arrays["\(i).0.\(j)"] = array }
                var scalars: [String: H2OSettingValue] = ["0.2": .int(cache.offset)]
                if rows.isEmpty { scalars["0.0"] = .null; scalars["0.1"] = .null }
                return .object([
                    "class": .string("KVCache"), "meta_state": .null, "scalars": .object(scalars),
                ])
            default:
                throw H2OError.file("Cannot save a \(type(of: cache)).")
            }
        }
        let kept = H2OSettingValue.object(metadata.mapValues { .string($0) })
        var header = [
            "format": fileFormat, "version": fileVersion, "metadata": kept.text,
            "entries": H2OSettingValue.array(entries).text,
        ]
        header["digest"] = fileDigest(
            arrays.mapValues { ($0.dtype, $0.shape) }, header
        ) { name in
            arrays[name]!.size > 0 ? arrays[name]!.asData(access: .copy).data : Data()
        }
        // A file always has one array.
        let written = arrays.isEmpty ? ["empty": MLXArray.zeros([1], dtype: .float32)] : arrays
        try save(arrays: written, metadata: header, url: url)
    }

    /// Read what ``saveCaches(_:to:metadata:)`` or Python's `mlx_h2o.save_prompt_cache` wrote.
    ///
    /// Keys and values take the dtype of the model's own with its next token.
    ///
    /// - Parameters:
    ///   - url: The file.
    ///   - model: The model that is to go on with them.
    ///   - pressure: What may ask for less memory while the caches are in use.
    /// - Returns: The caches, and the strings kept with them.
    /// - Throws: ``H2OError/file(_:)``: the file is missing, truncated, foreign, changed, of another
    ///   version or another model's.
    public static func loadCaches(
        from url: URL, for model: any LanguageModel, pressure: H2OMemoryPressure? = nil
    ) throws -> (caches: [any KVCache], metadata: [String: String]) {
        let loaded = try loadedCaches(from: url, pressure: pressure)
        do {
            try checkFit(loaded.caches, model)
        } catch {
            throw H2OError.file("\(url.path) cannot be loaded: \(error.localizedDescription)")
        }
        return loaded
    }

    /// The same, whatever model they are for.
    static func loadedCaches(
        from url: URL, pressure: H2OMemoryPressure? = nil
    ) throws -> (caches: [any KVCache], metadata: [String: String]) {
        let file: SafetensorsFile
        do {
            file = try SafetensorsFile(url)
        } catch {
            throw H2OError.file(
                "\(url.path) is no readable prompt cache: \(error.localizedDescription).")
        }
        do {
            let share = PressureShare(pressure, PressureAgreement())
            let caches = try checkedEntries(file).enumerated().map { i, entry in
                try restored(entry, file.entries(below: "\(i)."), share)
            }
            let metadata =
                try H2OSettingValue(parsing: file.metadata["metadata"] ?? "").object ?? [:]
            return (caches, metadata.compactMapValues(\.string))
        } catch {
            throw H2OError.file("\(url.path) cannot be loaded: \(error.localizedDescription)")
        }
    }

    /// Throw ``H2OError/file(_:)`` unless the model can go on with the caches.
    static func checkFit(_ caches: [any KVCache], _ model: any LanguageModel) throws {
        let plain = try H2OConfiguration.default.plainCaches(of: model)
        let members = placedMembers(of: plain), held = placedMembers(of: caches)
        let name = String(describing: type(of: model))
        guard members.count == held.count else {
            throw H2OError.file(
                "it holds \(held.count) layers and \(name) has \(members.count).")
        }
        let kinds = try H2OConfiguration.default.trial(of: model, with: plain).kinds
        for ((layer, cache), kind) in zip(held, kinds) {
            guard let cache = cache as? H2OKVCache, let types = cache.rowTypes else { continue }
            guard let kind, types.heads == kind.heads, types.keyWidth == kind.widths.key,
                types.valueWidth == kind.widths.value
            else {
                let found = kind.map { "\($0.heads) KV heads of \($0.widths.key)" } ?? "none such"
                throw H2OError.file(
                    "its layer \(layer) has \(types), and that of \(name) \(found): it is another "
                        + "model's.")
            }
            guard !cache.attends || kind.attends else {
                throw H2OError.policyNeedsAttention(
                    policy: cache.policy.name, model: name)
            }
        }
    }

    /// The file's caches as JSON, once it is known to be whole.
    private static func checkedEntries(_ file: SafetensorsFile) throws -> [H2OSettingValue] {
        var header = file.metadata
        guard header["format"] == fileFormat else {
            throw H2OError.file("it was not written by mlx-h2o.")
        }
        guard header["version"] == fileVersion else {
            throw H2OError.file(
                "it has format version \(header["version"] ?? "unknown"); this mlx-h2o reads "
                    + "\(fileVersion).")
        }
        let expected = header.removeValue(forKey: "digest")
        let kept = file.entries.filter { $0.key != "empty" }
        let found = fileDigest(kept.mapValues { ($0.dtype, $0.shape) }, header) { kept[$0]!.bytes }
        guard expected == found else {
            throw H2OError.file("it was changed or damaged after it was saved.")
        }
        guard let entries = try H2OSettingValue(parsing: header["entries"] ?? "").array else {
            throw H2OError.file("it lists no caches.")
        }
        return entries
    }

    /// One of the file's caches.
    private static func restored(
        _ entry: H2OSettingValue, _ own: [String: SafetensorsFile.Entry], _ pressure: PressureShare
    ) throws -> any KVCache {
        switch entry["class"]?.string {
        case "H2OKVCache":
            return try H2OKVCache.restored(
                own.mapValues(\.array), entry["config"] ?? .null, pressure)
        case "KVCache":
            let cache = KVCacheSimple()
            guard let keys = own["0.0"], let values = own["0.1"] else { return cache }
            guard keys.shape.count == 4, values.shape.count == 4,
                keys.shape.prefix(3) == values.shape.prefix(3), keys.dtype.isFloatingPoint,
                values.dtype.isFloatingPoint,
                let count = entry["scalars"]?["0.2"]?.int ?? .some(keys.shape[2]),
                0 ... keys.shape[2] ~= count
            else { throw H2OError.file("its plain cache is not whole.") }
            cache.state = [keys, values].map { $0.array[0..., 0..., 0 ..< count] }
            return cache
        case let name:
            throw H2OError.file("this cannot load a \(name ?? "cache without a class").")
        }
    }
}

extension SafetensorsFile {
    /// Arrays whose names begin so, without that beginning.
    fileprivate func entries(below prefix: String) -> [String: Entry] {
        entries.reduce(into: [:]) { own, found in
            if found.key.hasPrefix(prefix) {
                own[String(found.key.dropFirst(prefix.count))] = found.value
            }
        }
    }
}

/// SHA-256 over names, dtypes, shapes and bytes of all arrays, and the header.
func fileDigest(
    _ arrays: [String: (dtype: DType, shape: [Int])], _ header: [String: String],
    bytes: (String) -> Data
) -> String {
    var digest = SHA256Digest()
    for (key, value) in header.sorted(by: { ($0.key, $0.value) < ($1.key, $1.value) }) {
        digest.update(Data("\(key)=\(value)\n".utf8))
    }
    for name in arrays.keys.sorted() {
        let array = arrays[name]!, shape = array.shape
        // As Python prints a tuple.
        let tuple = shape.map(String.init).joined(separator: ", ") + (shape.count == 1 ? "," : "")
        digest.update(Data("\(name) mlx.core.\(pythonName(array.dtype)) (\(tuple))\n".utf8))
        digest.update(bytes(name))
    }
    return digest.hexadecimal()
}

private func pythonName(_ dtype: DType) -> String {
    switch dtype {
    case .bool: "bool_"
    default: "\(dtype)"
    }
}

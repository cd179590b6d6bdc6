import CMLXH2O
import Foundation
import MLX
import MLXLMCommon

extension H2OKVCache {
    /// Write a model's caches, evicted or not, with positions, scores, policy and remainder.
    ///
    /// The file is the one that Python's `mlx_h2o.save_prompt_cache` writes: either reads the other's.
    /// It takes the place of a file of that name once all is on disk; if anything fails, that file stays
    /// what it was. `savePromptCache` and `ChatSession.saveCache` of mlx-swift-lm cannot write these
    /// caches.
    ///
    /// - Parameters:
    ///   - caches: ``H2OKVCache`` and plain `KVCacheSimple` entries.
    ///   - url: The file.
    ///   - metadata: Strings to keep with them.
    /// - Throws: ``H2OError/file(_:)`` for a cache of another kind, or a file that cannot be written.
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
        let map = engineMap(of: arrays), texts = mlx_map_string_to_string_new()
        defer {
            mlx_map_string_to_array_free(map)
            mlx_map_string_to_string_free(texts)
        }
        for (name, text) in metadata { mlx_map_string_to_string_insert(texts, name, text) }
        _ = installedEvaluator
        let stream = StreamOrDevice.default
        try withExtendedLifetime((arrays, stream)) {
            try checkEngine(
                mlx_h2o_write_prompt_cache(
                    url.path, map, H2OSettingValue.array(entries).text, texts, stream.ctx))
        }
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
        var map = mlx_map_string_to_array_new(), metadata = mlx_map_string_to_string_new()
        var text = mlx_string_new()
        defer {
            mlx_map_string_to_array_free(map)
            mlx_map_string_to_string_free(metadata)
            mlx_string_free(text)
        }
        _ = installedEvaluator
        let stream = StreamOrDevice.default
        try withExtendedLifetime(stream) {
            try checkEngine(
                mlx_h2o_read_prompt_cache(&map, &text, &metadata, url.path, stream.ctx))
        }
        let all = arrays(of: map)
        do {
            let share = PressureShare(pressure, PressureAgreement())
            let entries = try H2OSettingValue(parsing: String(cString: mlx_string_data(text))).array
            guard let entries else { throw H2OError.file("it lists no caches.") }
            let caches = try entries.enumerated().map { i, entry in
                try restored(entry, below("\(i).", all), share)
            }
            return (caches, texts(of: metadata))
        } catch {
            throw H2OError.file("\(url.path) cannot be loaded: \(error.localizedDescription)")
        }
    }

    /// Throw ``H2OError/file(_:)`` unless the model can go on with the caches.
    static func checkFit(_ caches: [any KVCache], _ model: any LanguageModel) throws {
        let plain = try H2OConfiguration.default.plainCaches(of: model)
        let expected = placedMembers(of: plain), members = placedMembers(of: caches)
        let name = String(describing: type(of: model))
        guard members.count == expected.count else {
            throw H2OError.file(
                "it holds \(members.count) layers and \(name) has \(expected.count).")
        }
        let kinds = try H2OConfiguration.default.trial(of: model, with: plain).kinds
        for ((layer, cache), kind) in zip(members, kinds) {
            guard let cache = cache as? H2OKVCache, let types = cache.rowTypes else { continue }
            guard let kind, types.heads == kind.heads, types.keyWidth == kind.widths.key,
                types.valueWidth == kind.widths.value
            else {
                let own = kind.map { "\($0.heads) KV heads of \($0.widths.key)" } ?? "none such"
                throw H2OError.file(
                    "its layer \(layer) has \(types), and that of \(name) \(own): it is another "
                        + "model's.")
            }
            guard !cache.attends || kind.attends else {
                throw H2OError.policyNeedsAttention(
                    policy: cache.policy.name, model: name)
            }
        }
    }

    /// Arrays whose names begin so, without that beginning.
    private static func below(
        _ prefix: String, _ arrays: [String: MLXArray]
    ) -> [String: MLXArray] {
        arrays.reduce(into: [:]) { own, entry in
            if entry.key.hasPrefix(prefix) {
                own[String(entry.key.dropFirst(prefix.count))] = entry.value
            }
        }
    }

    /// One of the file's caches.
    private static func restored(
        _ entry: H2OSettingValue, _ own: [String: MLXArray], _ pressure: PressureShare
    ) throws -> any KVCache {
        switch entry["class"]?.string {
        case "H2OKVCache":
            return try H2OKVCache.restored(own, entry["config"] ?? .null, pressure)
        case "KVCache":
            let cache = KVCacheSimple()
            guard let keys = own["0.0"], let values = own["0.1"] else { return cache }
            guard keys.shape.count == 4, values.shape.count == 4,
                keys.shape.prefix(3) == values.shape.prefix(3), keys.dtype.isFloatingPoint,
                values.dtype.isFloatingPoint,
                let count = entry["scalars"]?["0.2"]?.int ?? .some(keys.shape[2]),
                0 ... keys.shape[2] ~= count
            else { throw H2OError.file("its plain cache is not whole.") }
            cache.state = [keys, values].map { $0[0..., 0..., 0 ..< count] }
            return cache
        case let name:
            throw H2OError.file("this cannot load a \(name ?? "cache without a class").")
        }
    }
}

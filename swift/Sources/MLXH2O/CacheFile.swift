import Foundation
import MLX
import MLXLMCommon

private let fileFormat = "mlx-h2o prompt cache"
private let fileVersion = "1"

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
public func saveCaches(
    _ caches: [any KVCache], to url: URL, metadata: [String: String] = [:]
) throws {
    var arrays: [String: MLXArray] = [:]
    let entries = try caches.enumerated().map { i, cache in
        switch cache {
        case let cache as H2OKVCache:
            for (name, array) in cache.namedArrays { arrays["\(i).\(name)"] = array }
            return SettingValue.object([
                "class": .string("H2OKVCache"), "config": cache.configuration,
            ])
        case let cache as KVCacheSimple where type(of: cache) == KVCacheSimple.self:
            // mlx-lm's keys, values and offset, by their places in its state.
            let rows = cache.state
            for (j, array) in rows.enumerated() { arrays["\(i).0.\(j)"] = array }
            var scalars: [String: SettingValue] = ["0.2": .int(cache.offset)]
            if rows.isEmpty { scalars["0.0"] = .null; scalars["0.1"] = .null }
            return .object([
                "class": .string("KVCache"), "meta_state": .null, "scalars": .object(scalars),
            ])
        default:
            throw H2OError.file("Cannot save a \(type(of: cache)).")
        }
    }
    let kept = SettingValue.object(metadata.mapValues { .string($0) })
    var header = [
        "format": fileFormat, "version": fileVersion, "metadata": kept.text,
        "entries": SettingValue.array(entries).text,
    ]
    header["digest"] = digest(arrays, header)
    // A file always has one array.
    let written = arrays.isEmpty ? ["empty": MLXArray.zeros([1], dtype: .float32)] : arrays
    try save(arrays: written, metadata: header, url: url)
}

/// Read what ``saveCaches(_:to:metadata:)`` or Python's `mlx_h2o.save_prompt_cache` wrote.
///
/// - Returns: The caches, and the strings kept with them.
/// - Throws: ``H2OError/file(_:)``: the file is missing, truncated, foreign, changed, or of another
///   version.
public func loadCaches(from url: URL) throws -> (caches: [any KVCache], metadata: [String: String])
{
    var arrays: [String: MLXArray], header: [String: String]
    do {
        try checkSafetensors(url)
        (arrays, header) = try loadArraysAndMetadata(url: url)
        try withError { eval(Array(arrays.values)) }
    } catch {
        throw H2OError.file(
            "\(url.path) is no readable prompt cache: \(error.localizedDescription)")
    }
    guard header["format"] == fileFormat else {
        throw H2OError.file("\(url.path) was not written by mlx-h2o.")
    }
    guard header["version"] == fileVersion else {
        throw H2OError.file(
            "\(url.path) has format version \(header["version"] ?? "unknown"); this mlx-h2o reads "
                + "\(fileVersion).")
    }
    let expected = header.removeValue(forKey: "digest")
    arrays["empty"] = nil
    guard expected == digest(arrays, header) else {
        throw H2OError.file("\(url.path) was changed or damaged after it was saved.")
    }
    guard let entries = try SettingValue(parsing: header["entries"] ?? "").array,
        let metadata = try SettingValue(parsing: header["metadata"] ?? "").object
    else {
        throw H2OError.file("\(url.path) is no readable prompt cache.")
    }
    let caches = try entries.enumerated().map { i, entry -> any KVCache in
        let own = arrays.reduce(into: [String: MLXArray]()) { own, found in
            let prefix = "\(i)."
            if found.key.hasPrefix(prefix) {
                own[String(found.key.dropFirst(prefix.count))] = found.value
            }
        }
        switch entry["class"]?.string {
        case "H2OKVCache":
            return try H2OKVCache.restored(own, entry["config"] ?? .null)
        case "KVCache":
            let cache = KVCacheSimple()
            if let keys = own["0.0"], let values = own["0.1"] {
                let count = entry["scalars"]?["0.2"]?.int ?? keys.dim(2)
                cache.state = [keys, values].map { $0.sliced(0 ..< count, axis: 2) }
            }
            return cache
        case let name:
            throw H2OError.file("This cannot load a \(name ?? "cache without a class").")
        }
    }
    return (caches, metadata.compactMapValues(\.string))
}

/// Throw unless a file begins as a safetensors file of its length does: MLX would end the process.
private func checkSafetensors(_ url: URL) throws {
    let file = try FileHandle(forReadingFrom: url)
    defer { try? file.close() }
    let length = try file.seekToEnd()
    try file.seek(toOffset: 0)
    let size = (try file.read(upToCount: 8) ?? Data()).reversed().reduce(UInt64(0)) {
        $0 << 8 | UInt64($1)
    }
    guard length >= 8, size <= length - 8, let text = try file.read(upToCount: Int(size)),
        let entries = try JSONDecoder().decode(SettingValue.self, from: text).object
    else {
        throw H2OError.file("it is truncated.")
    }
    for (name, entry) in entries where name != "__metadata__" {
        guard let end = entry["data_offsets"]?.array?.last?.int, 8 + Int(size) + end <= length
        else {
            throw H2OError.file("it is truncated.")
        }
    }
}

/// SHA-256 over names, dtypes, shapes and bytes of all arrays, and the header.
private func digest(_ arrays: [String: MLXArray], _ header: [String: String]) -> String {
    var digest = SHA256Digest()
    for (key, value) in header.sorted(by: { ($0.key, $0.value) < ($1.key, $1.value) }) {
        digest.update(Data("\(key)=\(value)\n".utf8))
    }
    for name in arrays.keys.sorted() {
        let array = arrays[name]!, shape = array.shape
        // As Python prints a tuple.
        let tuple = shape.map(String.init).joined(separator: ", ") + (shape.count == 1 ? "," : "")
        digest.update(Data("\(name) mlx.core.\(pythonName(array.dtype)) (\(tuple))\n".utf8))
        if array.size > 0 { digest.update(array.asData(access: .copy).data) }
    }
    return digest.hexadecimal()
}

private func pythonName(_ dtype: DType) -> String {
    switch dtype {
    case .bool: "bool_"
    default: "\(dtype)"
    }
}

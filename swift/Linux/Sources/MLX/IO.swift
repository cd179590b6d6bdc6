import Cmlx
import Foundation

public enum LoadSaveError: LocalizedError {
    case unableToOpen(URL, String)
    case unknownExtension(String)

    public var errorDescription: String? {
        switch self {
        case .unableToOpen(let url, let message): "\(message) \(url)"
        case .unknownExtension(let name): "Unknown extension \(name)"
        }
    }
}

/// Writes a safetensors file.
public func save(
    arrays: [String: MLXArray], metadata: [String: String] = [:], url: URL,
    stream: StreamOrDevice = .default
) throws {
    try requireSafetensors(url)
    let map = mlx_map_string_to_array_new()
    defer { mlx_map_string_to_array_free(map) }
    for (name, array) in arrays { mlx_map_string_to_array_insert(map, name, array.ctx) }
    let strings = mlx_map_string_to_string_new()
    defer { mlx_map_string_to_string_free(strings) }
    for (name, value) in metadata { mlx_map_string_to_string_insert(strings, name, value) }
    try withError { _ = mlx_save_safetensors(url.path, map, strings) }
}

public func loadArrays(url: URL, stream: StreamOrDevice = .cpu) throws -> [String: MLXArray] {
    try loadArraysAndMetadata(url: url, stream: stream).0
}

/// Reads a safetensors file.
public func loadArraysAndMetadata(
    url: URL, stream: StreamOrDevice = .cpu
) throws -> ([String: MLXArray], [String: String]) {
    try requireSafetensors(url)
    var map = mlx_map_string_to_array_new()
    var strings = mlx_map_string_to_string_new()
    defer {
        mlx_map_string_to_array_free(map)
        mlx_map_string_to_string_free(strings)
    }
    try withError { _ = mlx_load_safetensors(&map, &strings, url.path, stream.ctx) }
    return (arrays(of: map), metadata(of: strings))
}

private func requireSafetensors(_ url: URL) throws {
    precondition(url.isFileURL)
    if url.pathExtension != "safetensors" {
        throw LoadSaveError.unknownExtension(url.pathExtension)
    }
}

private func arrays(of map: mlx_map_string_to_array) -> [String: MLXArray] {
    let iterator = mlx_map_string_to_array_iterator_new(map)
    defer { mlx_map_string_to_array_iterator_free(iterator) }
    var found: [String: MLXArray] = [:]
    var name: UnsafePointer<CChar>?
    var value = mlx_array_new()
    while mlx_map_string_to_array_iterator_next(&name, &value, iterator) == 0, let name {
        found[String(cString: name)] = MLXArray(value)
        value = mlx_array_new()
    }
    return found
}

private func metadata(of map: mlx_map_string_to_string) -> [String: String] {
    let iterator = mlx_map_string_to_string_iterator_new(map)
    defer { mlx_map_string_to_string_iterator_free(iterator) }
    var found: [String: String] = [:]
    var name: UnsafePointer<CChar>?
    var value: UnsafePointer<CChar>?
    while mlx_map_string_to_string_iterator_next(&name, &value, iterator) == 0, let name, let value
    {
        found[String(cString: name)] = String(cString: value)
    }
    return found
}

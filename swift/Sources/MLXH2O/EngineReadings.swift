import CMLXH2O
import MLX

/// A prompt that the engine's caches read twice.
final class EngineReadings {
    private(set) var handle = mlx_h2o_two_readings_new()
    // The handle borrows their caches.
    private let engines: [Engine]

    /// Make room for all of a prompt in the caches of all layers.
    ///
    /// - Parameters:
    ///   - engines: The caches, in order.
    ///   - length: Tokens of the prompt.
    ///   - room: Slots of each head that stay free for later tokens.
    /// - Throws: ``H2OError/configuration(_:)`` for caches in which it cannot be read so; nothing is changed.
    init(_ engines: [Engine], length: Int, room: Int) throws {
        self.engines = engines
        try checkEngine(
            mlx_h2o_two_readings_begin(
                &handle, engines.map(\.handle), engines.count, Int32(clamping: length),
                Int32(clamping: room), stream))
    }

    deinit { mlx_h2o_two_readings_free(handle) }

    private var stream: mlx_stream { engines.first?.stream ?? StreamOrDevice.default.ctx }

    /// One call of a layer in the second reading, of which nothing is stored.
    ///
    /// - Returns: `[B, Hq, L, Dv]`.
    func attend(
        layer: Int, queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        sinks: MLXArray?
    ) throws -> MLXArray {
        let sinks = sinks ?? .mlxNone
        return try engineArray {
            mlx_h2o_second_reading_attend(
                &$0, handle, layer, queries.ctx, keys.ctx, values.ctx, scale, sinks.ctx,
                engines[layer].stream)
        }
    }

    /// All arrays that the second reading has made.
    func state() throws -> [MLXArray] {
        var list = mlx_vector_array_new()
        defer { mlx_vector_array_free(list) }
        try checkEngine(mlx_h2o_second_reading_state(&list, handle))
        return arrays(of: list)
    }

    /// Keep the rows worth most.
    func finish() throws { try checkEngine(mlx_h2o_two_readings_finish(handle, stream)) }

    /// Have the caches keep what they can within their bound.
    func abandon() throws { try checkEngine(mlx_h2o_two_readings_abandon(handle, stream)) }
}

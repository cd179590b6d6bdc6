import Cmlx

/// A value for a template parameter of a kernel: Bool, Int or DType.
public protocol KernelTemplateArg {}

extension Bool: KernelTemplateArg {}
extension Int: KernelTemplateArg {}
extension DType: KernelTemplateArg {}

extension MLXFast {
    /// A kernel of one's own. Where MLX has no Metal, making one is an error, which `withError`
    /// catches; nothing runs here.
    public final class MLXFastKernel: @unchecked Sendable {
        let kernel: mlx_fast_metal_kernel
        public let outputNames: [String]

        init(
            name: String, inputNames: [String], outputNames: [String], source: String,
            header: String,
            ensureRowContiguous: Bool, atomicOutputs: Bool
        ) {
            initError()
            self.outputNames = outputNames
            let inputs = vector(inputNames)
            let outputs = vector(outputNames)
            defer {
                mlx_vector_string_free(inputs)
                mlx_vector_string_free(outputs)
            }
            kernel = mlx_fast_metal_kernel_new(
                name, inputs, outputs, source, header, ensureRowContiguous, atomicOutputs)
        }

        deinit { mlx_fast_metal_kernel_free(kernel) }

        public func callAsFunction(
            _ inputs: [any ScalarOrArray], template: [(String, any KernelTemplateArg)]? = nil,
            grid: (Int, Int, Int), threadGroup: (Int, Int, Int),
            outputShapes: some Sequence<[Int]>, outputDTypes: some Sequence<DType>,
            initValue: Float? = nil, verbose: Bool = false, stream: StreamOrDevice = .default
        ) -> [MLXArray] {
            let config = mlx_fast_metal_kernel_config_new()
            defer { mlx_fast_metal_kernel_config_free(config) }
            for (name, value) in template ?? [] {
                switch value {
                case let value as Bool:
                    mlx_fast_metal_kernel_config_add_template_arg_bool(config, name, value)
                case let value as Int:
                    mlx_fast_metal_kernel_config_add_template_arg_int(config, name, Int32(value))
                case let value as DType:
                    mlx_fast_metal_kernel_config_add_template_arg_dtype(
                        config, name, value.cmlxDtype)
                default:
                    fatalError("template argument \(name) is a \(type(of: value))")
                }
            }
            mlx_fast_metal_kernel_config_set_grid(
                config, Int32(grid.0), Int32(grid.1), Int32(grid.2))
            mlx_fast_metal_kernel_config_set_thread_group(
                config, Int32(threadGroup.0), Int32(threadGroup.1), Int32(threadGroup.2))
            for (shape, dtype) in zip(outputShapes, outputDTypes) {
                mlx_fast_metal_kernel_config_add_output_arg(
                    config, shape.asInt32, shape.count, dtype.cmlxDtype)
            }
            if let initValue { mlx_fast_metal_kernel_config_set_init_value(config, initValue) }
            mlx_fast_metal_kernel_config_set_verbose(config, verbose)
            return withVector(inputs.map { $0.asMLXArray(dtype: nil) }) { inputs in
                results { mlx_fast_metal_kernel_apply(&$0, kernel, inputs, config, stream.ctx) }
            }
        }
    }

    public static func metalKernel(
        name: String, inputNames: some Sequence<String>, outputNames: some Sequence<String>,
        source: String, header: String = "", ensureRowContiguous: Bool = true,
        atomicOutputs: Bool = false
    ) -> MLXFastKernel {
        MLXFastKernel(
            name: name, inputNames: Array(inputNames), outputNames: Array(outputNames),
            source: source,
            header: header, ensureRowContiguous: ensureRowContiguous, atomicOutputs: atomicOutputs)
    }
}

private func vector(_ strings: [String]) -> mlx_vector_string {
    let vector = mlx_vector_string_new()
    for string in strings { mlx_vector_string_append_value(vector, string) }
    return vector
}

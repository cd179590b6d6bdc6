#!/usr/bin/env bash
# Compiles swift/Sources and the engine on Linux against the sources of Apple's packages, which it does
# not build: of their modules only the declarations are read.
#
#   tools/check_swift_upstream.sh FOLDER [OUT]
#
# FOLDER holds checkouts by the names mlx-swift, mlx-swift-lm, mlx-c (the commit that mlx-swift names
# for Source/Cmlx/mlx-c) and swift-numerics. OUT (a new temporary folder) gets the modules. What Linux
# has not (AVFoundation, CoreImage, CoreGraphics, os, which mlx-swift-lm 3.31.4 imports) is declared
# here, as far as declarations need it; CryptoKit and memory pressure are those of swift/Linux.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
real=$(cd "$1" && pwd)
out=${2:-$(mktemp -d)}
mkdir -p "$out/cmlx" "$out/modules" "$out/declared" "$out/include"

cp "$real"/mlx-swift/Source/Cmlx/include/{mlx.h,module.modulemap} "$out/cmlx/"
cp -r "$real/mlx-c/mlx" "$out/cmlx/"
cp "$root"/c_api/include/* "$out/include/"

cat >"$out/declared/AVFoundation.swift" <<'SWIFT'
import Foundation
open class AVAsset { public init(url: URL) {} }
public struct CMTime: Sendable {}
public typealias AudioFormatID = UInt32
public let kAudioFormatLinearPCM: AudioFormatID = 0
SWIFT
cat >"$out/declared/CoreImage.swift" <<'SWIFT'
import Foundation
open class CIImage { public init?(contentsOf: URL) {} }
SWIFT
echo 'import Foundation' >"$out/declared/CoreGraphics.swift"
cat >"$out/declared/os.swift" <<'SWIFT'
public struct Logger: Sendable {
  public init(subsystem: String, category: String) {}
  public func error(_ message: OSLogMessage) {}
  public func warning(_ message: OSLogMessage) {}
  public func notice(_ message: OSLogMessage) {}
  public func info(_ message: OSLogMessage) {}
  public func debug(_ message: OSLogMessage) {}
}
public struct OSLogPrivacy { public static let `public` = OSLogPrivacy() }
public struct OSLogMessage: ExpressibleByStringInterpolation {
  public struct StringInterpolation: StringInterpolationProtocol {
    public init(literalCapacity: Int, interpolationCount: Int) {}
    public mutating func appendLiteral(_ literal: String) {}
    public mutating func appendInterpolation<T>(
      _ value: @autoclosure () -> T, privacy: OSLogPrivacy = .public) {}
  }
  public init(stringInterpolation: StringInterpolation) {}
  public init(stringLiteral value: String) {}
}
SWIFT

common=(-I "$out/modules" -I "$out/cmlx" -I "$out/include" -Xcc "-I$out/cmlx" -Xcc "-I$out/include"
  -Xcc "-I$real/swift-numerics/Sources/_NumericsShims/include" -module-cache-path "$out/cache"
  -parse-as-library)

# The declarations of the sources below a folder, as a module.
declare_module() {
  local name=$1 sources
  mapfile -t sources < <(find "$2" -name '*.swift' ! -name '*+Metal.swift' ! -name '*+CUDA.swift')
  echo "declarations: $name"
  swiftc -emit-module -module-name "$name" -emit-module-path "$out/modules/$name.swiftmodule" \
    "${common[@]}" -swift-version 5 -package-name upstream -suppress-warnings \
    -Xfrontend -experimental-skip-non-inlinable-function-bodies "${sources[@]}"
}
for name in RealModule ComplexModule IntegerUtilities Numerics; do
  declare_module $name "$real/swift-numerics/Sources/$name"
done
for name in MLX MLXNN MLXOptimizers; do declare_module $name "$real/mlx-swift/Source/$name"; done
if grep -q '^import CoreGraphics' "$real/mlx-swift-lm/Libraries/MLXLMCommon/ChatSession.swift"; then
  for name in AVFoundation CoreImage CoreGraphics os; do
    declare_module $name "$out/declared/$name.swift"
  done
fi
for name in MLXLMCommon MLXLLM; do
  declare_module $name "$real/mlx-swift-lm/Libraries/$name"
done
for name in CryptoKit DispatchMemoryPressure; do
  declare_module $name "$root/swift/Linux/Sources/$name"
done

mapfile -t sources < <(find "$root/swift/Sources/MLXH2O" -name '*.swift')
swiftc -c -wmo -o "$out/MLXH2O.o" -emit-module -emit-module-path "$out/modules/MLXH2O.swiftmodule" \
  -module-name MLXH2O -package-name mlx_h2o -swift-version 6 "${common[@]}" "${sources[@]}"
echo "compiled: ${#sources[@]} files of swift/Sources/MLXH2O, in Swift 6 mode"

declare_module Tokenizers "$root/swift/Linux/Sources/Tokenizers"
declare_module LocalTokenizers "$root/swift/Examples/Chat/Sources/LocalTokenizers"
swiftc -typecheck -module-name ChatApp -swift-version 6 "${common[@]}" \
  "$root"/swift/Examples/ChatApp/{Chat,MemoryUse}.swift
echo "type-checked: what of swift/Examples/ChatApp is no view"

clang=$(dirname "$(readlink -f "$(command -v swiftc)")")/clang++
mapfile -t engine < <(
  find "$root/c_api/src" -name '*.cpp' ! -path '*/src/cpu/*' ! -path "$root/c_api/src/cpu_kernels.cpp")
for file in "${engine[@]}"; do
  "$clang" -std=c++20 -fsyntax-only -Wno-deprecated-declarations -DMLX_H2O_OVER_MLX_C \
    '-DMLX_H2O_VERSION=""' -I "$out/cmlx" -I "$root/c_api/include" -I "$root/c_api/src" "$file"
done
echo "type-checked: ${#engine[@]} files of c_api/src over mlx-c"
